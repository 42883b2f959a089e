"""Replays of a real agent against a scripted model, over a memory and a SQLite store."""

import asyncio
import json
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RolloutQuery
from agl_inspect.records.learning import GateRules, LearningCandidate, ReplayPair, ReplayTask
from agl_learn.replay import TrialReplayer, batches
from agl_learn.settings import LearnerFile
from agl_testing.model_server import ScriptedModelServer

from .conftest import POLITE, UseLearner, conversation, publish, run_with

CANDIDATE = LearningCandidate(
    id="c1",
    number=1,
    versions={"prompt": "polite"},
    baseline={"prompt": "first"},
    origin="apo",
    conversations=12,
    created_at=0.0,
    moves=[],
    rules=GateRules(tasks=10),
)
HELD_OUT = [conversation(number, kind="order") for number in range(12)]


async def replay(file: LearnerFile, *, start: int = 0, most: int = 1_000, text: str = POLITE) -> list[ReplayPair]:
    await publish(file.store, polite=text)
    found: list[ReplayPair] = []
    async with aclosing(TrialReplayer(file).pairs(CANDIDATE, HELD_OUT, start=start)) as pairs:
        async for pair in pairs:
            found.append(pair)
            if len(found) == most:
                break
    return found


async def count(file: LearnerFile) -> int:
    return await file.store.count_rollouts(RolloutQuery(experiment="support-replay-c1"))


def test_replay_compares_old_new_and_control_with_newest_first(with_learner: UseLearner) -> None:
    pairs: list[ReplayPair] = with_learner(replay)

    assert [f"u{number}" for number in range(11, 1, -1)] == [pair.unit for pair in pairs]
    assert {("order", 0.0, 1.0, 0.0)} == {(pair.kind, pair.old, pair.new, pair.control) for pair in pairs}


def test_rollouts_of_a_pair_differ_only_in_their_versions(with_learner: UseLearner) -> None:
    async def work(file: LearnerFile) -> Any:
        (pair,) = await replay(file, most=1)
        return [(await file.store.rollouts(RolloutQuery(ids=(each,))))[0] for each in pair.rollouts]

    rollouts = with_learner(work)

    assert ["first", "polite", "first"] == [rollout.resources["prompt"] for rollout in rollouts]
    assert 1 == len({json.dumps(rollout.task) for rollout in rollouts})
    assert 1 == len({rollout.metadata["seed"] for rollout in rollouts})


def test_replay_that_is_stopped_early_runs_one_batch(with_learner: UseLearner) -> None:
    async def work(file: LearnerFile) -> tuple[int, int]:
        return len(await replay(file, most=3)), await count(file)

    assert (3, 8 * 3) == with_learner(work)


def test_pairs_that_ran_are_not_run_again(with_learner: UseLearner, server: ScriptedModelServer) -> None:
    async def work(file: LearnerFile) -> tuple[list[ReplayPair], list[ReplayPair], int]:
        first = await replay(file)
        calls = len(server.calls)
        again = await replay(file, start=5)
        return first, again, len(server.calls) - calls

    first, again, calls = with_learner(work)

    assert (first[5:], 0) == (again, calls)


def test_failed_rollout_counts_as_zero(with_learner: UseLearner) -> None:
    async def work(file: LearnerFile) -> list[ReplayPair]:
        return await replay(file, text="Answer in {tongue}: {question}", most=2)

    assert [(0.0, 0.0), (0.0, 0.0)] == [(pair.old, pair.new) for pair in with_learner(work)]


@pytest.mark.parametrize("control", [True, False])
def test_regression_tasks_follow_the_conversations(folder: Path, control: bool) -> None:
    tasks = [{"question": f"old question {number}?", "wish": "Wait"} for number in range(2)]
    (folder / "old.jsonl").write_text("\n".join(map(json.dumps, tasks)), encoding="utf-8")
    gate = f'\n[learn.support.gate]\nreplay = {{ regression = "old.jsonl", control = {str(control).lower()} }}\n'

    pairs: list[ReplayPair] = asyncio.run(run_with(folder, replay, toml=gate))

    assert ["order"] * 10 + ["regression"] * 2 == [pair.kind for pair in pairs]
    assert [(1.0, 0.0, 1.0 if control else None)] * 2 == [(pair.old, pair.new, pair.control) for pair in pairs[10:]]


@pytest.mark.parametrize("conversations", [0, 5, 8, 100])
def test_batches_do_not_depend_on_the_start_and_separate_regression_tasks(conversations: int) -> None:
    tasks = [ReplayTask(unit="", kind="", task=None)] * conversations
    tasks += [ReplayTask(unit="", kind="regression", task=None)] * 9
    whole = list(batches(tasks, start=0))

    assert list(range(len(tasks))) == [position for begin, end in whole for position in range(begin, end)]
    assert any(begin == conversations for begin, _ in whole)
    for start in range(len(tasks)):
        assert [each for each in whole if each[1] > start] == list(batches(tasks, start=start))


def test_batches_grow() -> None:
    tasks = [ReplayTask(unit="", kind="", task=None)] * 1_000

    assert [8, 16, 32, 64, 64] == [end - begin for begin, end in islice(batches(tasks, start=0), 5)]
