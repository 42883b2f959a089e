"""Tasks that a proposer mints stay at the solver's level while it learns; proposer and solver are tabular policies.

A task has a level, and a solver of skill s masters it with probability 1 / (1 + exp(level - s)). The proposer draws
levels around its mean m. Both learn by REINFORCE from the rollouts of ``mint``, through the real engine.
"""

import asyncio
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import pytest

import agl
from agl import AlgorithmContext, AlgorithmEntry, Rollout, Span, StepReport, semconv
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.episodes import ScoreOptions, admitted_rewards, score
from agl.errors import AglError, ConfigError, RunError
from agl.schemas import Episode, Json, JsonResource
from agl.stores import MemoryStore, read_recordings
from agl_objectives.tasks import canonical
from agl_run import FitResult, Quiet

SPREAD = 0.8
HELD = [{"level": level / 2, "number": number} for level in range(8) for number in range(8)]


def mastered(level: float, skill: float) -> float:
    return 1 / (1 + math.exp(level - skill))


async def play(task: Any, solver: Mapping[str, float], proposer: Mapping[str, float], rollout: Rollout) -> float | None:
    """Propose a task, or solve one; one of twenty proposals is no task, and one is a task of the validation set."""
    draw = random.Random(rollout.rollout_id)
    if "propose" not in task:
        return float(draw.random() < mastered(task["level"], solver["at"]))
    if (chance := draw.random()) > 0.05:
        level = proposer["at"] + draw.gauss(0.0, SPREAD)
        agl.emit_object(HELD[0] if chance > 0.95 else {"level": level}, name="task")
    return None


class Tabular:
    """Moves one number along the policy gradient of the rollouts that its source has collected."""

    def __init__(self, *, rate: float) -> None:
        self._rate = rate
        self._after, self._step, self._at = dict[str, int](), 0, 0.0

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        context, self._step = self._context, self._step + 1
        found = await context.recorded(after=self._after, max_age=0)
        self._after = dict(found.steps)
        slopes = [self._slope(group) for group in found.groups() if self._is_own(group[0].rollout.task)]
        self._at += self._rate * fmean(slopes or [0.0])
        await context.publish(context.tunes[0], JsonResource(value={"at": self._at}), step=self._step)
        return StepReport(step=self._step, is_finished=found.is_over, metrics={"at": self._at})

    def _is_own(self, task: Any) -> bool:
        return ("propose" in task) is (self._context.tunes == ("proposer",))

    def _slope(self, group: list[Episode]) -> float:
        mean = fmean(one.reward or 0.0 for one in group)
        return fmean(((one.reward or 0.0) - mean) * self._score(one) for one in group)

    def _score(self, one: Episode) -> float:
        """The derivative of the log-probability of what the rollout drew."""
        raise NotImplementedError

    def state(self) -> Mapping[str, Json]:
        return {"step": self._step, "after": cast("Any", self._after), "at": self._at}

    async def restore(self, state: Mapping[str, Any]) -> None:
        self._step, self._after, self._at = state["step"], dict(state["after"]), state["at"]

    async def close(self) -> None: ...


class Solver(Tabular):
    def _score(self, one: Episode) -> float:
        return (one.reward or 0.0) - mastered(one.rollout.task["level"], self._at)


class Proposer(Tabular):
    def _score(self, one: Episode) -> float:
        draw = random.Random(one.rollout.rollout_id)
        return draw.gauss(0.0, SPREAD) / SPREAD**2 if 0.05 < draw.random() <= 0.95 else 0.0


class Plugin:
    @agl.hookimpl
    def agl_algorithms(self) -> Iterable[AlgorithmEntry]:
        for name, factory in (("solving", Solver), ("proposing", Proposer)):
            yield AlgorithmEntry(name=name, factory=factory, tunes=("json",), needs_token_ids=False, shares=True)


def run(
    store: MemoryStore, folder: Path, *, steps: int, rate: float = 2.0, agent: Any = play, resume: bool = False
) -> FitResult:
    """Run ``mint`` with both policies, of which the proposer learns at ``rate``."""
    manager = agl.PluginManager.from_environment()
    manager.register(Plugin(), name="tabular")
    trainer = agl.Trainer(
        name="duo",
        algorithm=[
            algorithm("mint", tunes="minted", budget=16 * steps, batch_size=2),
            algorithm("solving", tunes="solver", source="mint", rate=0.3),
            algorithm("proposing", tunes="proposer", source="mint", rate=rate),
        ],
        initial_resources={
            "minted": JsonResource(value=[]),
            "solver": JsonResource(value={"at": 0.0}),
            "proposer": JsonResource(value={"at": 0.0}),
        },
        schedule="alternate",
        store=store,
        n_runners=16,
        plugins=manager,
        progress=Quiet(),
        folder=folder,
        workdir=str(folder),
    )
    return trainer.fit(agent, [{"propose": "any"}, {"propose": "another"}], HELD, resume=resume)


def metric(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "duo" / "metrics.jsonl").read_text().splitlines())
    return [line["value"] for line in lines if (line["algorithm"], line["name"]) == ("mint", name)]


class Ran(NamedTuple):
    step: Any
    task: Any
    emitted: Any
    reward: float | None


async def rollouts_of(store: MemoryStore) -> list[Ran]:
    found: list[Ran] = []
    async for one in read_recordings(store, RolloutQuery(experiment="duo", mode="train"), spans="deciding"):
        emitted = [span.attributes[semconv.OBJECT] for span in one.spans if span.name == "object task"]
        rewards = admitted_rewards(one.spans, one.rollout.attempt_id, ScoreOptions())
        reward = score(rewards, options=ScoreOptions()).value
        found.append(Ran(one.rollout.metadata["step"], one.rollout.task, [*emitted, None][0], reward))
    return found


@pytest.mark.long
@pytest.mark.parametrize("rate", [2.0, 0.0])
def test_minted_tasks_stay_at_the_level_of_a_solver_that_learns(tmp_path: Path, rate: float) -> None:
    result = run(MemoryStore(), tmp_path, steps=50, rate=rate)
    rates = metric(tmp_path, "solve_rate")
    assert 50 == len(rates)
    means = [fmean(rates[at : at + 5]) for at in range(0, 50, 5)]
    assert (rate > 0) is all(0.3 <= mean <= 0.7 for mean in means)  # a proposer that learns nothing falls behind
    assert result.before is not None
    assert result.after is not None
    assert result.after > result.before + 0.2


def test_proposals_are_rewarded_by_the_rate_of_their_solvers(tmp_path: Path) -> None:
    store = MemoryStore()
    result = run(store, tmp_path, steps=3)
    assert {"mint": 3, "solving": 3, "proposing": 3} == result.steps
    episodes = asyncio.run(rollouts_of(store))
    solved: dict[str, list[float]] = {}
    for one in episodes:
        if "level" in one.task:
            solved.setdefault(canonical(one.task), []).append(one.reward or 0.0)
    assert {8} == {len(rewards) for rewards in solved.values()}
    proposals = [one for one in episodes if "propose" in one.task]
    assert 48 == len(proposals)
    wrong = [one for one in proposals if one.emitted in (None, HELD[0])]
    assert {None, canonical(HELD[0])} == {one.emitted and canonical(one.emitted) for one in wrong}
    for one in proposals:
        expected = 0.0 if one.emitted in (None, HELD[0]) else 1 - 2 * abs(fmean(solved[canonical(one.emitted)]) - 0.5)
        assert pytest.approx(expected) == one.reward
    version = asyncio.run(store.resource("minted", result.resources["minted"]))
    assert isinstance(version.resource, JsonResource)
    minted = [one.emitted for one in proposals if one.step == 3 and one.emitted not in (None, HELD[0])]
    assert sorted(map(canonical, minted)) == sorted(map(canonical, cast("list[Any]", version.resource.value)))


class CutStore(MemoryStore):
    """Cuts the power when the rewards of the second step's proposals have been stored."""

    def __init__(self) -> None:
        super().__init__()
        self._times = 0

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await super().append_spans(spans)
        self._times += all(span.reward is not None and span.reward.source == "evaluator" for span in spans)
        if self._times == 2:
            raise AglError("power cut")


def test_run_that_broke_continues_and_rewards_no_proposal_twice(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(MemoryStore(), whole, steps=3)
    store = CutStore()
    with pytest.raises(AglError, match="power cut"):
        run(store, broken, steps=3)
    run(store, broken, steps=3, resume=True)
    assert metric(whole, "solve_rate") == metric(broken, "solve_rate")
    assert [1] * 48 == asyncio.run(counts_of_rewards(store))


async def counts_of_rewards(store: MemoryStore) -> list[int]:
    """Return the number of rewards of each proposal."""
    read = read_recordings(store, RolloutQuery(experiment="duo", mode="train"), spans="deciding")
    return [
        sum(span.reward is not None for span in one.spans) async for one in read if "propose" in str(one.rollout.task)
    ]


def test_solvers_with_rewards_above_1_are_refused(tmp_path: Path) -> None:
    async def generous(task: Any, solver: Any, proposer: Any, rollout: Rollout) -> float | None:
        reward = await play(task, solver, proposer, rollout)
        return None if reward is None else 10 * reward

    with pytest.raises(
        ConfigError, match=r"rewards of solvers from 0 to 1, and duo-\S+ got 10 \(its rewards: return\)"
    ):
        run(MemoryStore(), tmp_path, steps=1, agent=generous)


def test_step_in_which_no_proposal_succeeds_ends_the_run(tmp_path: Path) -> None:
    async def breaks(task: Any) -> None:
        if "propose" in task:
            raise ValueError("no JSON")

    with pytest.raises(RunError, match="none of the 16 proposals of step 1 succeeded; the first failed with 'no JSON'"):
        run(MemoryStore(), tmp_path, steps=1, agent=breaks)
