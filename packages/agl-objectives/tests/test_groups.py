"""Silent groups of a step are replaced within limits, and a curriculum chooses tasks by recorded rewards."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from agl.errors import ConfigError, RunError
from agl.schemas import CallCredit, Episode, Rollout, Row, Segment, Transition, pack_floats, pack_ids
from agl_objectives.answers import SoftOverlong
from agl_objectives.groups import DROPPED, NO_BASELINE, GroupSampler, SampledGroups, Silence
from agl_objectives.tasks import TaskDraws, draw_places
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from agl.contracts import Collected
    from agl_testing.conformance.bench import RolloutOrder

COUNT, N = 4, 2


class Village:
    """Tasks with known rewards: the rollouts of `loud` tasks have the rewards 0 and 1, all others have the reward 1."""

    def __init__(
        self, folder: Path, *, tasks: int = 20, loud: Callable[[int], bool] = lambda n: n % 2 == 0, **options: Any
    ) -> None:
        self.loud = loud
        self.broken: set[int] = set()  # tasks without a usable rollout
        self.keys: list[str] = []
        train = [{"n": n} for n in range(tasks)]
        self.bench = AlgorithmBench(
            AlgorithmScenario(make=lambda: None, play=self.play, tunes=(), train=train),  # type: ignore[arg-type,return-value]  # the bench makes no algorithm here
            folder,
        )
        self.options = {"count": COUNT, "n": N, **options}

    def play(self, order: RolloutOrder) -> Episode:
        number = int(order.rollout.task["n"])
        sample = int(order.rollout.rollout_id.rsplit("-", 1)[1])
        return episode(order.rollout, reward=float(sample % 2) if self.loud(number) else 1.0)

    async def collect(self, tasks: Sequence[Any], **request: Any) -> Collected:
        self.keys.append(request.get("key", ""))
        if tasks and all(task["n"] in self.broken for task in tasks):
            raise RunError(f"none of {len(tasks)} rollouts can be used")
        found = await self.bench.collect(tasks, **request)
        assert [task for task in tasks for _ in range(request.get("n", 1))] == [
            e.rollout.task for e in found.episodes
        ], "other tasks' ids"
        return found

    def sampler(self) -> GroupSampler:
        sampler = GroupSampler("grpo", **self.options)
        context = self.bench.context()
        object.__setattr__(context, "collect", self.collect)
        sampler.begin(context)
        return sampler

    def step(self, number: int = 1) -> SampledGroups:
        return asyncio.run(self.sampler().collect(number))


def episode(rollout: Rollout, *, reward: float | None, tokens: int = 2) -> Episode:
    span = f"{rollout.rollout_id}/0"
    row = Row(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt_id,
        group_id=rollout.group_id,
        branch=0,
        ids=pack_ids(range(tokens + 1)),
        mask=bytes([0] + [1] * tokens),
        logprobs=pack_floats([0.0] * (tokens + 1)),
        segments=(Segment(start=1, stop=tokens + 1, span_id=span),),
    )
    call = Transition(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt_id,
        span_id=span,
        branch=0,
        response_ids=pack_ids(range(tokens)),
    )
    return Episode(rollout=rollout, attempt=None, reward=reward, transitions=(call,), rows=(row,))


def tasks_of(groups: Sequence[Sequence[Episode]]) -> list[int]:
    return [group[0].rollout.task["n"] for group in groups]


def test_without_rounds_a_step_keeps_every_group(tmp_path: Path) -> None:
    village = Village(tmp_path)
    found = village.step()
    assert COUNT == len(found.groups)
    assert ([""], ["collect_s"], {}) == (village.keys, list(found.metrics), found.uses)


def test_silent_groups_are_replaced_until_the_step_has_its_number(tmp_path: Path) -> None:
    village = Village(tmp_path, refill=10)
    found = village.step()
    assert COUNT == len(found.groups)
    assert all(village.loud(n) for n in tasks_of(found.groups))
    drawn = [e.rollout.task["n"] for e in found.episodes]
    assert {N} == set(Counter(drawn).values()), "no task comes twice in a step"
    extra = found.metrics["rollouts_extra"]
    assert extra > 0
    assert extra == len(found.episodes) - COUNT * N
    assert found.metrics["groups_dropped"] == found.metrics["groups_silent"] == extra / N
    assert 0.0 == found.metrics["groups_missing"]
    assert found.metrics["refill_rounds"] == len(village.keys) - 1


def test_the_rounds_of_a_step_are_bounded(tmp_path: Path) -> None:
    village = Village(tmp_path, tasks=1000, loud=lambda n: n % 50 == 0, refill=2)
    found = village.step()
    assert 3 == len(village.keys)
    assert found.metrics["rollouts_extra"] <= 2 * COUNT * N
    assert found.metrics["groups_missing"] == COUNT - sum(village.loud(n) for n in tasks_of(found.groups))


def test_a_step_ends_its_rounds_when_it_has_taken_every_task(tmp_path: Path) -> None:
    village = Village(tmp_path, tasks=6, loud=lambda n: n == 0, refill=50)
    found = village.step()
    assert [0] == tasks_of(found.groups)
    assert (6.0, 5.0, 3.0) == tuple(found.metrics[name] for name in ("groups", "groups_dropped", "groups_missing"))


def test_a_step_of_silent_groups_keeps_those_that_it_began_with(tmp_path: Path) -> None:
    village = Village(tmp_path, loud=lambda n: False, refill=2)
    found = village.step()
    context = village.bench.context()
    assert draw_places(context, step=1, count=COUNT) == tasks_of(found.groups)
    assert (12.0, 8.0, 12.0) == tuple(found.metrics[name] for name in ("groups", "groups_dropped", "groups_silent"))


def test_metrics_describe_every_rollout_and_not_only_those_that_are_kept(tmp_path: Path) -> None:
    found = Village(tmp_path, refill=10).step()
    rewards = [e.reward or 0.0 for e in found.episodes]
    assert found.metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert found.metrics["reward"] > 0.6, "silent groups succeeded"
    assert found.metrics["silent_share"] == pytest.approx(found.metrics["groups_silent"] / found.metrics["groups"])
    assert len(rewards) == found.metrics["rollouts"]


def test_rollouts_of_dropped_groups_are_named_with_their_credit(tmp_path: Path) -> None:
    found = Village(tmp_path, refill=10).step()
    kept = {e.rollout.rollout_id for group in found.groups for e in group}
    assert {e.rollout.rollout_id for e in found.episodes} - kept == set(found.uses)
    assert {(DROPPED, -1, 1.0, None)} == {
        (call.note, call.row, call.credit, call.advantage) for calls in found.uses.values() for call in calls
    }


def test_a_repeated_step_asks_for_the_same_rollouts(tmp_path: Path) -> None:
    village = Village(tmp_path, refill=10)
    first = village.step()
    paid = set(village.bench.collected)
    again = village.step()
    assert paid == set(village.bench.collected)
    assert tasks_of(first.groups) == tasks_of(again.groups)


def test_a_reward_that_came_late_gives_no_rollout_another_task(tmp_path: Path) -> None:
    village = Village(tmp_path, tasks=200, loud=lambda n: n % 8 == 0, refill=10)
    before = village.step()
    assert before.metrics["refill_rounds"] > 2
    silent = next(e for e in before.episodes if not village.loud(e.rollout.task["n"]))
    name = silent.rollout.rollout_id
    assert "refill" not in name, "of the tasks that the step begins with, so that its rounds ask for one less"
    village.bench.collected[name] = episode(silent.rollout, reward=0.0)
    kept = village.step().groups  # `Village.collect` compares the tasks with those of the rollouts
    assert silent.rollout.task["n"] in tasks_of(kept)


def test_rounds_without_a_usable_rollout_are_counted_and_end_nothing(tmp_path: Path) -> None:
    village = Village(tmp_path, refill=10)
    first = draw_places(village.bench.context(), step=1, count=COUNT)
    village.broken = set(range(20)) - set(first)
    found = village.step()
    assert sum(village.loud(n) for n in first) == len(found.groups)
    assert found.metrics["rollouts_extra"] == found.dropped["unusable"] > 0
    village.broken = set(range(20))
    with pytest.raises(RunError, match="none of 4 rollouts"):
        village.step(2)


async def is_odd(group: Sequence[Episode]) -> bool:
    return group[0].rollout.task["n"] % 2 == 1


class Shared(Village):
    """Tasks that share one group (`group_key`). Greedy rollouts earn a tenth of the task number, in task 3 nothing."""

    def play(self, order: RolloutOrder) -> Episode:
        played = super().play(order)
        number = played.rollout.task["n"]
        greedy = None if number == 3 else number / 10
        reward = greedy if order.is_greedy else played.reward
        return replace(played, rollout=replace(played.rollout, group_id="all"), reward=reward)


def test_rollouts_that_share_a_group_are_compared_with_the_greedy_one_of_their_own_task(tmp_path: Path) -> None:
    found = Shared(tmp_path, tasks=4, has_greedy=True).step()
    rewards = {group[0].rollout.task["n"]: one.reward for group, one in zip(found.groups, found.baselines, strict=True)}
    assert {0: 0.0, 1: 0.1, 2: 0.2} == rewards
    assert all(e.rollout.task == group[0].rollout.task for group in found.groups for e in group)
    assert [N] * 3 == [len(group) for group in found.groups]
    left_out = [e.rollout.rollout_id for e in found.episodes if e.rollout.task["n"] == 3]
    assert N == len(left_out)
    assert {NO_BASELINE} == {use.note for rollout in left_out for use in found.uses[rollout]}
    assert 1.0 == found.metrics["groups_without_baseline"]


def test_an_algorithm_may_say_itself_which_groups_are_silent(tmp_path: Path) -> None:
    silence = Silence(of=is_odd, note="odd")
    found = Village(tmp_path, loud=lambda n: n % 3 == 0, n=1, refill=10, silence=silence).step()
    assert COUNT == len(found.groups)
    assert {0} == {n % 2 for n in tasks_of(found.groups)}
    assert found.metrics["groups_dropped"] == len(found.uses) > 0
    assert {"odd"} == {call.note for calls in found.uses.values() for call in calls}


def test_a_curriculum_without_any_reward_is_refused_in_the_first_step(tmp_path: Path) -> None:
    village = Village(tmp_path, curriculum="frontier", keeps_all=True)
    object.__setattr__(village.bench.scenario, "play", lambda order: episode(order.rollout, reward=None))
    with pytest.raises(ConfigError, match=r"none of the 8 finished rollouts of step 1 has one. Add a \[\[reward"):
        village.step()


def test_a_step_in_which_every_rollout_failed_does_not_end_a_curriculum(tmp_path: Path) -> None:
    village = Village(tmp_path, curriculum="frontier", keeps_all=True)

    def fail(order: RolloutOrder) -> Episode:
        return episode(replace(order.rollout, status="failed"), reward=None)

    object.__setattr__(village.bench.scenario, "play", fail)
    assert [None] * 8 == [each.reward for each in village.step().episodes]


class Turns:
    """A credit that gives each rollout of a group the value at its position in `values`."""

    def __init__(self, *values: float, is_advantage: bool = False) -> None:
        self.values, self.is_advantage = values, is_advantage

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        return [
            [CallCredit(span_id=e.transitions[0].span_id, value=value, baseline="", is_advantage=self.is_advantage)]
            for e, value in zip(group, self.values, strict=True)
        ]


@pytest.mark.parametrize(
    ("credit", "options", "is_silent"),
    [
        (Turns(0.5, 0.5 + 1e-9), {}, True),
        (Turns(0.5, 0.6), {}, False),
        (Turns(0.0, 0.0, is_advantage=True), {}, True),
        (Turns(0.5, 0.5, is_advantage=True), {}, False),
    ],
    ids=["rounding", "credit", "no-advantage", "advantage"],
)
def test_credit_decides_what_is_silent(tmp_path: Path, credit: Any, options: dict[str, Any], is_silent: bool) -> None:
    village = Village(tmp_path, loud=lambda n: False, refill=1, **options)
    village.bench._credit = credit
    assert (COUNT * 2 if is_silent else COUNT) == village.step().metrics["groups"]


def test_a_punished_answer_makes_a_difference(tmp_path: Path) -> None:
    village = Village(tmp_path, loud=lambda n: False, refill=1, overlong=SoftOverlong(limit=4, buffer=4))
    village.play = lambda order: episode(  # type: ignore[method-assign]
        order.rollout, reward=1.0, tokens=1 + int(order.rollout.rollout_id[-1])
    )
    object.__setattr__(village.bench.scenario, "play", village.play)
    assert COUNT == village.step().metrics["groups"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refill": -1}, "refill = -1; give the most rounds"),
        ({"refill": 1, "n": 1}, "groups of 1 rollout, which has nothing to differ from"),
        ({"curriculum": "fronteer"}, "curriculum = 'fronteer'; did you mean 'frontier'"),
    ],
    ids=["negative", "alone", "unknown"],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupSampler("grpo", **{"count": COUNT, "n": N, **options})


class TestCurriculum:
    """Tests of the tasks that a curriculum draws."""

    def successes(self, folder: Path, *, curriculum: str, steps: int, share: Callable[[int], float]) -> Counter[int]:
        """Count how often the later half of the steps draws each task; a task succeeds in `share` of its rollouts."""
        village = Village(folder, tasks=40)
        draws = TaskDraws("grpo", curriculum=curriculum)  # type: ignore[arg-type]
        draws.begin(village.bench.context())
        drawn: Counter[int] = Counter()
        for step in range(1, steps + 1):
            places = draws.first(step, 8)
            assert 8 == len(set(places))
            drawn.update(places if step > steps // 2 else [])
            draws.note([e for n in places for e in self.group(n, share(n))], places)
        return drawn

    def group(self, number: int, share: float) -> list[Episode]:
        rollouts = [Rollout(rollout_id=f"{number}-{i}", task={"n": number}, group_id=str(number)) for i in range(4)]
        return [episode(r, reward=float(i < share * 4)) for i, r in enumerate(rollouts)]

    def test_the_frontier_is_drawn_more_often_and_no_task_starves(self, tmp_path: Path) -> None:
        shares = (0.0, 0.25, 0.5, 1.0)
        drawn = self.successes(tmp_path, curriculum="frontier", steps=120, share=lambda n: shares[n % 4])
        by_share = {share: sum(drawn[n] for n in range(i, 40, 4)) for i, share in enumerate(shares)}
        assert by_share[0.5] > 1.05 * by_share[0.25] > 2 * by_share[0.0]
        assert 40 == len(drawn), "the share that is drawn without preference reaches every task"

    def test_the_unsolved_are_drawn_more_often(self, tmp_path: Path) -> None:
        drawn = self.successes(tmp_path, curriculum="unsolved", steps=120, share=lambda n: float(n % 2))
        assert sum(drawn[n] for n in range(0, 40, 2)) > 2 * sum(drawn[n] for n in range(1, 40, 2))

    def test_tasks_that_were_never_drawn_come_before_those_without_a_preference(self, tmp_path: Path) -> None:
        village = Village(tmp_path, tasks=12)
        draws = TaskDraws("grpo", curriculum="frontier")
        draws.begin(village.bench.context())
        draws.note([e for n in range(6) for e in self.group(n, float(n % 2))], range(6))
        assert set(range(6, 12)) == set(draws.further(1, taken=(), count=6))

    @pytest.mark.parametrize(("low", "high"), [(0.1, 0.7), (-0.3, 0.1), (1e6, 1e6 + 0.01)])
    def test_a_task_that_always_got_the_same_bound_has_no_preference_after_a_restart_either(
        self, tmp_path: Path, low: float, high: float
    ) -> None:
        village = Village(tmp_path, tasks=12)
        draws = TaskDraws("grpo", curriculum="frontier")
        draws.begin(village.bench.context())
        by_reward = {0: low, 1: high}
        episodes = [replace(e, reward=by_reward[n % 2]) for n in range(6) for e in self.group(n, 1.0)[:3]]
        for _ in range(2):
            draws.note(episodes, range(6))
        assert set(range(6, 12)) == set(draws.further(1, taken=(), count=6))
        again = TaskDraws("grpo", curriculum="frontier")
        again.begin(village.bench.context())
        again.restore(
            {**draws.state(), "low": low, "high": high}
        )  # bounds in double precision, as they were saved once
        assert draws.further(1, taken=(), count=12) == again.further(1, taken=(), count=12)

    def test_a_restored_curriculum_draws_what_the_saved_one_would(self, tmp_path: Path) -> None:
        village = Village(tmp_path, curriculum="frontier", refill=2)
        one = village.sampler()
        for step in (1, 2, 3):
            asyncio.run(one.collect(step))
        two = village.sampler()
        two.restore(json.loads(json.dumps(one.state())))
        played = len(village.bench.collected)
        asyncio.run(one.collect(4))
        assert len(village.bench.collected) > played
        played = len(village.bench.collected)
        asyncio.run(two.collect(4))
        assert played == len(village.bench.collected)

    def test_tasks_may_be_added_over_a_restart(self, tmp_path: Path) -> None:
        small = Village(tmp_path / "small", tasks=6, curriculum="unsolved", count=6)
        one = small.sampler()
        asyncio.run(one.collect(1))
        large = Village(tmp_path / "large", tasks=9, curriculum="unsolved", count=9).sampler()
        large.restore(one.state())
        assert 9 == len(asyncio.run(large.collect(2)).groups)

    def test_a_task_whose_keys_a_store_has_sorted_is_known_again(self, tmp_path: Path) -> None:
        village = Village(tmp_path)
        object.__setattr__(village.bench.scenario, "train", [{"b": 1, "a": 2}, {"b": 3, "a": 4}])
        draws = TaskDraws("grpo", curriculum="frontier")
        draws.begin(village.bench.context())
        rollout = Rollout(rollout_id="r", task={"a": 2, "b": 1}, group_id="g")
        draws.note([episode(rollout, reward=0.5)], [0])
        assert {"tasks_seen": 1.0} == draws.metrics([0])

    def test_what_is_saved_stays_small(self, tmp_path: Path) -> None:
        village = Village(tmp_path, tasks=20_000)
        draws = TaskDraws("grpo", curriculum="frontier")
        draws.begin(village.bench.context())
        for first in range(0, 20_000, 1000):
            places = range(first, first + 1000)
            draws.note([e for n in places for e in self.group(n, n % 5 / 4)], places)
        assert len(json.dumps(draws.state())) < 6 * 20_000
