"""Replays of a real agent against a scripted model, over a memory and a SQLite store."""

import asyncio
import json
from collections.abc import Collection
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RolloutQuery
from agl.schemas import LLM, Episode, ResourceVersion, Rollout
from agl.stores import read_recordings
from agl_inspect.records.learning import GateRules, LearningCandidate, ReplayPair
from agl_inspect.records.splits import SERVED, ServedSplit
from agl_learn.replay import TrialReplayer, batches, pair_of
from agl_learn.settings import LearnerFile
from agl_testing.model_server import Reply, ScriptedModelServer

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
    rules=GateRules(),
)
HELD_OUT = [conversation(number, kind="order") for number in range(10)]


async def replay(
    file: LearnerFile, *, done: Collection[str] = (), most: int = 1_000, text: str = POLITE
) -> list[ReplayPair]:
    await publish(file.store, polite=text)
    found: list[ReplayPair] = []
    async with aclosing(TrialReplayer(file).pairs(CANDIDATE, HELD_OUT, done=done)) as pairs:
        async for pair in pairs:
            found.append(pair)
            if len(found) == most:
                break
    return found


async def count(file: LearnerFile) -> int:
    return await file.store.count_rollouts(RolloutQuery(experiment="support-replay-c1"))


def test_replay_compares_old_new_and_control_in_order(with_learner: UseLearner) -> None:
    pairs: list[ReplayPair] = with_learner(replay)

    assert [f"u{number}" for number in range(10)] == [pair.unit for pair in pairs]
    assert {("order", 0.0, 1.0, 0.0)} == {(pair.kind, pair.old, pair.new, pair.control) for pair in pairs}


def test_rollouts_of_a_pair_differ_only_in_their_versions(with_learner: UseLearner) -> None:
    async def work(file: LearnerFile) -> Any:
        pair = (await replay(file, most=2))[1]
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
        again = await replay(file, done=("u1", "u3"))
        return first, again, len(server.calls) - calls

    first, again, calls = with_learner(work)

    assert ([pair for pair in first if pair.unit not in ("u1", "u3")], 0) == (again, calls)


def test_resources_that_a_candidate_does_not_change_have_their_served_versions(with_learner: UseLearner) -> None:
    async def work(file: LearnerFile) -> Any:
        await file.store.publish([ResourceVersion(name="llm", version="v7", resource=LLM(model="scripted"))])
        pins = {"production": {"llm": "v7", "prompt": "first"}}
        await SERVED.add(file.store, {"": ServedSplit(shares={"production": 1.0}, versions=pins)})
        (pair,) = await replay(file, most=1)
        return [(await file.store.rollouts(RolloutQuery(ids=(each,))))[0].resources for each in pair.rollouts]

    assert [("v7", "first"), ("v7", "polite"), ("v7", "first")] == [
        (each["llm"], each["prompt"]) for each in with_learner(work)
    ]


def test_failed_rollout_counts_as_zero(with_learner: UseLearner) -> None:
    async def work(file: LearnerFile) -> list[ReplayPair]:
        return await replay(file, text="Answer in {tongue}: {question}", most=2)

    assert [(0.0, 0.0), (0.0, 0.0)] == [(pair.old, pair.new) for pair in with_learner(work)]


def test_pair_without_a_reward_shows_no_difference() -> None:
    rewards = [1.0, None, 1.0]
    episodes = [
        Episode(rollout=Rollout(rollout_id=f"r{n}", task=None, status="succeeded"), attempt=None, reward=reward)
        for n, reward in enumerate(rewards)
    ]

    pair = pair_of(episodes, unit="ann", kind="")

    assert (1.0, 1.0, 1.0) == (pair.old, pair.new, pair.control)


@pytest.mark.parametrize("control", [True, False])
def test_regression_tasks_follow_the_conversations(folder: Path, control: bool) -> None:
    tasks = [{"question": f"old question {number}?", "wish": "Wait"} for number in range(2)]
    (folder / "old.jsonl").write_text("\n".join(map(json.dumps, tasks)), encoding="utf-8")
    replays = f'replay = {{ regression = "old.jsonl", control = {str(control).lower()} }}'
    gate = f"\n[learn.support.gate]\n{replays}\n"

    pairs: list[ReplayPair] = asyncio.run(run_with(folder, replay, url="memory://", toml=gate))

    assert ["order"] * 10 + ["regression"] * 2 == [pair.kind for pair in pairs]
    assert [(1.0, 0.0, 1.0 if control else None)] * 2 == [(pair.old, pair.new, pair.control) for pair in pairs[10:]]


def test_batches_grow_up_to_a_limit() -> None:
    tasks: Any = range(1_000)

    assert [8, 16, 32, 64, 64] == [len(batch) for batch in islice(batches(tasks), 5)]
    assert list(tasks) == [task for batch in batches(tasks) for task in batch]


DRAFTING = """
from openai import AsyncOpenAI

async def solve(task, llm, prompt):
    async with AsyncOpenAI(base_url=llm.endpoint, api_key="k", max_retries=0) as client:
        draft = await ask(client, llm, "Draft an answer: " + task["question"])
        return await ask(client, llm, prompt.format(question=draft))

async def ask(client, llm, text):
    answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content

def wish(rollout, spans):
    return 1.0
"""


def test_calls_that_a_prompt_does_not_change_share_their_answers(folder: Path, server: ScriptedModelServer) -> None:
    (folder / "learn_agent.py").write_text(DRAFTING, encoding="utf-8")
    server.respond_with(lambda request: Reply(text=f"answer {request.index}"))

    async def work(file: LearnerFile) -> list[list[str]]:
        return [[await draft_of(file, each) for each in pair.rollouts] for pair in await replay(file)]

    drafts: list[list[str]] = asyncio.run(run_with(folder, work, url="memory://"))

    assert 10 * (3 + 2) == len(server.calls)
    assert all(old == new != control for old, new, control in drafts)
    assert 20 == len({draft for pair in drafts for draft in pair})


async def draft_of(file: LearnerFile, rollout_id: str) -> str:
    """Return the answer to the first call of a rollout."""
    (recording,) = [each async for each in read_recordings(file.store, RolloutQuery(ids=(rollout_id,)))]
    return next(str(span.call.response["choices"][0]["message"]["content"]) for span in recording.spans if span.call)
