"""The judge of groups: questions, answers, ranks, cost and failures, and how far a policy learns from it."""

import asyncio
import math
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import pytest
from msgspec.structs import replace

from agl.contracts import Recording, RewardEmitter
from agl.errors import ConfigError
from agl.schemas import Reward
from agl_rewards.composite import Composite, CompositePart
from agl_rewards.group_judge import GroupJudge
from agl_rewards.judge import Endpoint, Judge
from agl_testing.conformance.reward import RewardConformance
from agl_testing.model_server import Reply, ScriptedModelServer, Status

from .cases import chat, one, rollout, setup

TASK = {"question": "Which number is larger?", "answer": "9"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_rewards.judge.BACKOFF_S", 0.01)


def group(*texts: str, name: str = "r") -> list[Recording]:
    return [
        Recording(rollout=_renamed(f"{name}{number}"), attempts=[], spans=[chat(1, text)])
        for number, text in enumerate(texts)
    ]


def _renamed(rollout_id: str) -> Any:
    return replace(rollout(TASK), rollout_id=rollout_id)


def judge(server: ScriptedModelServer, **params: Any) -> GroupJudge:
    return GroupJudge(model=Endpoint(base_url=server.base_url, model="scripted"), **params)


def works_of(prompt: str) -> list[str]:
    return re.findall(r"<work \d+>\n(.*?)\n</work \d+>", prompt, re.DOTALL)


def prompt_of(call: Any) -> str:
    """Return the question of a recorded call, or of a request that is being answered."""
    body = call.json if hasattr(call, "json") else call.body
    return body["messages"][0]["content"]


def ranking(order: Sequence[int], letter: str = "A") -> str:
    return f"{letter}: " + " > ".join(str(index + 1) for index in order)


def by_number(prompt: str) -> list[int]:
    works = works_of(prompt)
    return sorted(range(len(works)), key=lambda index: -float(works[index]))


def compared(answer: Callable[[str], str], texts: Sequence[str], **params: Any) -> tuple[list[Reward], list[str]]:
    """Return the rewards of a group, and the questions that the judge was asked."""
    with ScriptedModelServer(respond=lambda call: Reply(text=answer(prompt_of(call)))) as server:
        rewards = asyncio.run(judge(server, **params).compare(group(*texts)))
        return rewards, [prompt_of(call) for call in server.calls]


def test_works_get_their_ranks_with_two_questions_in_opposite_orders() -> None:
    rewards, asked = compared(lambda prompt: "Larger.\n" + ranking(by_number(prompt)), ["3", "9", "1", "5", "7"])
    assert [0.25, 1.0, 0.0, 0.5, 0.75] == [reward.value for reward in rewards]
    assert {("group-judge", "evaluator")} == {(reward.name, reward.source) for reward in rewards}
    assert 2 == len(asked)
    first, second = map(works_of, asked)
    assert first == second[::-1]
    assert all("Larger." in reward.feedback for reward in rewards)


def test_judge_that_follows_the_order_gives_equal_rewards() -> None:
    rewards, _ = compared(lambda prompt: ranking(range(4)), ["3", "9", "1", "5"])
    assert [0.5] * 4 == [reward.value for reward in rewards]


def test_equal_works_share_their_rank_and_a_group_of_them_is_not_asked_about() -> None:
    rewards, _ = compared(lambda prompt: ranking(by_number(prompt)), ["9", "3", "9", "1"])
    assert [pytest.approx(value) for value in (5 / 6, 1 / 3, 5 / 6, 0.0)] == [reward.value for reward in rewards]
    same, asked = compared(lambda prompt: ranking(by_number(prompt)), ["9", "9"])
    assert ([0.5, 0.5], []) == ([reward.value for reward in same], asked)


@pytest.mark.parametrize(
    "wrong", ["A: 1 > 2", "A: 1 > 2 > 2", "A: 1 > 2 > 4", "1 > 2 > 3", "A: 1 > 2 > 3\nA: 3 > 2 > 1"]
)
def test_answer_without_a_ranking_of_all_works_is_repaired_once(wrong: str) -> None:
    def answer(prompt: str) -> str:
        return ranking(by_number(prompt)) if "You answered:" in prompt else wrong

    rewards, asked = compared(answer, ["3", "9", "1"])
    assert ([0.5, 1.0, 0.0], 4) == ([reward.value for reward in rewards], len(asked))
    assert wrong in next(prompt for prompt in asked if "You answered:" in prompt)
    missing, asked = compared(lambda prompt: wrong, ["3", "9", "1"])
    assert ([None] * 3, 4) == ([reward.value for reward in missing], len(asked))
    assert all("the judge ranked nothing: its answer was" in reward.feedback for reward in missing)


def test_judge_that_answers_one_question_of_two_gives_no_reward() -> None:
    steps = [Reply(text="A: 1 > 2"), Status(code=400, message="too long")]
    with ScriptedModelServer(steps, default=None) as server:
        rewards = asyncio.run(judge(server).compare(group("3", "9")))
    assert [None, None] == [reward.value for reward in rewards]
    assert "too long" in rewards[0].feedback


def test_works_are_cut_and_the_lines_that_they_share_are_shown_once() -> None:
    long = "x" * 500 + "y" * 500
    works = [f"[user]\nhello\n[assistant]\n{number}\n{long}\n{number}" for number in (3, 9)]
    _, (prompt, _) = compared(lambda prompt: "A: 1 > 2", works, max_chars=100)
    assert 1 == prompt.count("[user]\nhello\n[assistant]\n")
    assert all("characters are left out here]" in work and len(work) < 160 for work in works_of(prompt))


def test_conversation_is_compared_with_its_roles() -> None:
    _, (prompt, _) = compared(lambda prompt: "A: 1 > 2", ["3", "9"], source="conversation")
    assert "<common>\n[user]\nquestion\n[assistant]\n" in prompt
    assert {"3\n", "9\n"} == set(works_of(prompt))


def test_rubric_weighs_the_ranks_by_each_criterion() -> None:
    def answer(prompt: str) -> str:
        order = by_number(prompt)
        return ranking(order) + "\n" + ranking(order[::-1], "B")

    rewards, asked = compared(answer, ["3", "9"], rubric={"is large": 3.0, "is small": 1.0})
    assert [0.25, 0.75] == [reward.value for reward in rewards]
    assert {"is large": 1.0, "is small": 0.0} == rewards[1].dimensions
    assert {"is large": 3.0, "is small": 1.0} == rewards[1].weights
    assert "A: is large\nB: is small\n" in asked[0]


def test_dropout_leaves_criteria_out_of_both_questions_and_keeps_one() -> None:
    rubric = {f"criterion {number}": 1.0 for number in range(4)}
    counts: list[int] = []

    def respond(call: Any) -> Reply:
        letters = re.findall(r"^([A-D]): criterion", prompt_of(call), re.MULTILINE)
        counts.append(len(letters))
        return Reply(text="\n".join(f"{letter}: 1 > 2" for letter in letters))

    with ScriptedModelServer(respond=respond) as server:
        made = judge(server, rubric=rubric, dropout=0.5)
        rewards = [asyncio.run(made.compare(group("3", "9", name=f"g{n}-")))[0] for n in range(40)]
    assert counts[::2] == counts[1::2] == [len(reward.dimensions) for reward in rewards]
    assert {1, 2, 3} <= set(counts) <= {1, 2, 3, 4}
    assert 1.5 < fmean(counts) < 2.6


@pytest.mark.parametrize(
    "params", [{"rubric": {}}, {"rubric": {"a": 0.0}}, {"dropout": 1.0}, {"template": "Rank them."}]
)
def test_settings_that_cannot_rank_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GroupJudge(model=Endpoint(base_url="http://127.0.0.1:1/v1", model="m"), **params)


def test_composite_refuses_a_judge_of_groups() -> None:
    part = CompositePart(use="group-judge", weight=1.0, params={"model": {"base_url": "http://h/v1", "model": "m"}})
    with pytest.raises(ConfigError, match="a \\[\\[reward\\]\\] of its own"):
        Composite(parts={"ranks": part}, setup=setup())


TASKS, ANSWERS, GROUP, STEPS = 8, 6, 8, 60


class NoisyJudge:
    """A judge at temperature 0: its errors follow from the question, and so it repeats them when it is asked again.

    Of two works it prefers the better one in 75% of the pairs, but half of the pairs it decides by the order alone.
    Alone, it scores a work with an error so large that 75% of the pairs of scores are in the right order.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, call: Any) -> Reply:
        prompt = prompt_of(call)
        rng = random.Random(f"{self._seed}/{prompt}")
        works = [int(work) for work in works_of(prompt)]
        return Reply(text=self._ranked(works, rng) if works else self._scored(prompt, rng))

    def _ranked(self, works: Sequence[int], rng: random.Random) -> str:
        wins = [0] * len(works)
        for early in range(len(works)):
            for late in range(early + 1, len(works)):
                better, worse = (early, late) if works[early] >= works[late] else (late, early)
                by_merit = better if rng.random() < 0.75 else worse
                wins[early if rng.random() < 0.5 else by_merit] += 1
        return ranking(sorted(range(len(works)), key=lambda index: -wins[index]))

    def _scored(self, prompt: str, rng: random.Random) -> str:
        (work,) = re.findall(r"<work>\n(\d+)\n</work>", prompt)
        score = 10 * (quality(int(work)) + rng.gauss(0, 0.45))
        return f"Score: {min(10, max(0, round(score)))}"


Draws = Sequence[Sequence[int]]
"""The answers that were drawn for each task."""


def learned(rewards: Callable[[Draws], Sequence[Sequence[float]]], seed: int) -> float:
    """Return the mean quality, from 0 to 1, of a table of policies after steps of the policy gradient."""
    rng = random.Random(seed)
    table = [[0.0] * ANSWERS for _ in range(TASKS)]
    for _ in range(STEPS):
        draws = [rng.choices(range(ANSWERS), _softmax(row), k=GROUP) for row in table]
        for row, drawn, given in zip(table, draws, rewards(draws), strict=True):
            chances, mean = _softmax(row), fmean(given)
            for answer, reward in zip(drawn, given, strict=True):
                step = 4 * (reward - mean) / GROUP
                row[:] = [z + step * ((k == answer) - chances[k]) for k, z in enumerate(row)]
    return fmean(sum(p * quality(k) for k, p in enumerate(_softmax(row))) for row in table)


def quality(answer: int) -> float:
    return answer / (ANSWERS - 1)


def _softmax(row: Sequence[float]) -> list[float]:
    powers = [math.exp(z - max(row)) for z in row]
    return [power / sum(powers) for power in powers]


def by_group(made: GroupJudge, draws: Draws) -> list[list[float]]:
    async def all_groups() -> list[list[Reward]]:
        # New ids for every step, as in a run.
        ids = (f"{random.getrandbits(64)}-" for _ in draws)
        groups = [group(*map(str, drawn), name=name) for name, drawn in zip(ids, draws, strict=True)]
        return await asyncio.gather(*map(made.compare, groups))

    return [[reward.value or 0.0 for reward in rewards] for rewards in asyncio.run(all_groups())]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
def test_policy_learns_from_a_noisy_judge_of_groups_and_not_from_its_scores(seed: int) -> None:
    random.seed(seed)
    true = learned(lambda draws: [list(map(quality, drawn)) for drawn in draws], seed)
    with ScriptedModelServer(respond=NoisyJudge(seed)) as server:
        endpoint = Endpoint(base_url=server.base_url, model="scripted")
        grouped = learned(partial(by_group, GroupJudge(model=endpoint)), seed)
        alone = Judge(model=endpoint)
        # The judge repeats itself, so each work is scored once.
        scores = [[one(alone, {"task": n}, str(k)).value or 0.0 for k in range(ANSWERS)] for n in range(TASKS)]
    single = learned(lambda draws: [[row[k] for k in drawn] for row, drawn in zip(scores, draws, strict=True)], seed)
    assert grouped >= true - 0.05
    assert single < true - 0.05


class TestGroupJudge(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return GroupJudge(model=Endpoint(base_url="http://127.0.0.1:1/v1", model="m"))
