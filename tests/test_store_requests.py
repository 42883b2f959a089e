"""Rollouts and their spans are read once at a rollout's end, and in batches otherwise."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import algorithm
from agl.contracts import Recording, RolloutQuery, Store
from agl.episodes import build_episode
from agl.schemas import Episode, ModelCall, Outcome, PromptTemplate, Rollout, Span, pack_ids
from agl.stores import MemoryStore, read_recordings
from agl_gateway.client import HttpStore
from agl_gateway.embedded import EmbeddedGateway
from agl_run import Quiet
from agl_run.access.tokens import AttemptTokens
from agl_store_sqlite._store import SQLiteStore
from agl_testing.plugins import PluginFolder

SECRET = b"a secret for counting what is asked"

LEARNER = '''
import agl
from agl.contracts import StepReport
from agl_testing.toys import ToyAlgorithm


class Collects(ToyAlgorithm):
    """One step that collects, and keeps the episodes."""

    episodes = []

    async def step(self):
        collected = await self._context.collect(self._context.train, step=1)
        self.episodes += collected.episodes
        return StepReport(step=1, is_finished=True)


def counted(rollout, spans):
    return float(sum(span.name == "look" for span in spans))


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="collects", factory=Collects, tunes=("prompt_template",), needs_token_ids=False)


@agl.hookimpl
def agl_rewards():
    yield agl.RewardEntry(name="counted", factory=lambda **_: counted)
'''


class Counting(MemoryStore):
    """Counts how often the spans of a rollout were read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    async def spans(self, rollout_id: str, **options: Any) -> list[Span]:
        self.reads[rollout_id] += 1
        return await super().spans(rollout_id, **options)

    async def recordings(self, query: RolloutQuery, **options: Any) -> list[Recording]:
        found = await super().recordings(query, **options)
        if options.get("spans") != "none":
            self.reads.update(recording.rollout.rollout_id for recording in found)
        return found


@pytest.mark.parametrize("rewards", [["counted"], []])
def test_spans_are_read_once_at_the_end_of_a_rollout(
    agl_plugins: PluginFolder, tmp_path: Path, rewards: list[str]
) -> None:
    episodes: list[Episode] = __import__(agl_plugins.install(LEARNER, name="learner")).Collects.episodes

    @agl.agent
    def agent(task: int) -> float | None:
        for _ in range(task):
            with agl.operation("look"):
                pass
        return None if rewards else float(task)

    store = Counting()
    trainer = agl.Trainer(
        algorithm=algorithm("collects", tunes="prompt"),
        initial_resources={"prompt": PromptTemplate(template="none")},
        rewards=rewards,
        store=store,
        folder=tmp_path,
        progress=Quiet(),
    )
    trainer.fit(agent, train_dataset=[1, 2, 3, 4])
    assert [1.0, 2.0, 3.0, 4.0] == sorted(episode.reward or 0.0 for episode in episodes)
    assert dict.fromkeys((episode.rollout.rollout_id for episode in episodes), 1) == store.reads


class Served(SQLiteStore):
    """Counts what is asked of it by name; a gateway asks once for each request that it gets."""

    requests: Counter[str] = Counter()

    async def rollouts(self, *args: Any, **options: Any) -> Any:
        self.requests["rollouts"] += 1
        return await super().rollouts(*args, **options)

    async def attempts(self, *args: Any, **options: Any) -> Any:
        self.requests["attempts"] += 1
        return await super().attempts(*args, **options)

    async def spans(self, *args: Any, **options: Any) -> Any:
        self.requests["spans"] += 1
        return await super().spans(*args, **options)

    async def recordings(self, *args: Any, **options: Any) -> Any:
        self.requests["recordings"] += 1
        return await super().recordings(*args, **options)


def a_call(at: int) -> ModelCall:
    """A turn of a conversation of long prompts."""
    prompt = range(1000 + 500 * at)
    return ModelCall(
        request_id=f"r{at}",
        dialect="chat",
        model="m",
        request={"messages": [{"role": "user", "content": "x" * (4000 + 2000 * at)}]},
        response={"choices": [{"message": {"role": "assistant", "content": "y" * 2000}}]},
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(range(prompt.stop, prompt.stop + 200)),
    )


async def fill(store: Store, count: int) -> list[str]:
    """Finished rollouts, each with three turns; returns their ids."""
    rollouts = [Rollout(rollout_id=f"ro-{at:03d}", task=at, experiment="e") for at in range(count)]
    await store.enqueue(rollouts)
    outcomes: list[Outcome] = []
    for claim in await store.claim(worker="w", limit=count):
        where = {"rollout_id": claim.rollout.rollout_id, "attempt_id": claim.attempt.attempt_id}
        spans = [Span(**where, span_id=f"{at:016x}", name="chat", call=a_call(at)) for at in range(3)]
        outcomes.append(Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=tuple(spans)))
    await store.finish(outcomes)
    return [rollout.rollout_id for rollout in rollouts]


async def episodes_of(store: Store, query: RolloutQuery) -> list[Episode]:
    return [
        build_episode(recording.rollout, recording.attempts[-1], recording.spans)
        async for recording in read_recordings(store, query)
    ]


def test_128_episodes_over_http_take_at_most_four_requests(tmp_path: Path) -> None:
    async def work() -> tuple[list[Episode], list[Episode]]:
        served = Served(f"sqlite:///{tmp_path}/served.db")
        gateway = EmbeddedGateway()
        url = await gateway.start(store=served, upstreams=[], secret=SECRET)
        token = AttemptTokens(SECRET).issue("", "", scope="admin", expires_at=time.time() + 600)
        store = HttpStore(url, token=token)
        ids = await fill(store, 128)
        served.requests.clear()
        over_http = await episodes_of(store, RolloutQuery(ids=tuple(ids), limit=len(ids)))
        assert sum(served.requests.values()) <= 4, served.requests
        here = await episodes_of(served, RolloutQuery(experiment="e"))
        await store.close()
        await gateway.stop()
        await served.close()
        return over_http, here

    over_http, here = asyncio.run(work())
    assert [f"ro-{at:03d}" for at in range(128)] == [episode.rollout.rollout_id for episode in over_http]
    assert [3] * 128 == [len(episode.transitions) for episode in over_http]
    assert here == over_http
