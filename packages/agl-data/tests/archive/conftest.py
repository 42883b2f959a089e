"""Stores with recorded rollouts, and a new archive for each test."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from agl.contracts import ExperimentRecord, LabelMove, Metric, RolloutQuery, Store, VersionScore
from agl.schemas import (
    ErrorInfo,
    ModelCall,
    Outcome,
    PromptTemplate,
    ResourceVersion,
    RetryPolicy,
    Reward,
    Rollout,
    Span,
    pack_floats,
    pack_ids,
)
from agl.stores import MemoryStore, read_recordings
from agl_data.archive.archiving import Archived, Archiving, Choice
from agl_data.archive.places import Place
from agl_data.archive.restoring import Restored, find_parts, restore_parts

ALL = RolloutQuery(limit=1_000)
RETRY = RetryPolicy(max_attempts=2)


def span(rollout_id: str, attempt_id: str, number: int, **fields: Any) -> Span:
    return Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=f"{number:016x}", **{"name": "chat m", **fields})


def call(number: int) -> ModelCall:
    return ModelCall(
        request_id=f"q{number}",
        dialect="chat",
        model="small",
        policy="p",
        request={"messages": [{"role": "user", "content": f"\x1b[31m[bold]{number}\ud7ff"}]},
        response={"choices": [{"text": "é", "score": 0.1}]},
        prompt_ids=pack_ids([number, 2, 3]),
        response_ids=pack_ids([4, -5]),
        logprobs=pack_floats([-0.25, float("nan")]),
    )


async def record(store: Store, experiment: str = "sums", *, ids: Sequence[int] = range(4), step: int = 1) -> list[str]:
    """Record rollouts that first fail and then succeed; return their ids. Rollout number n has the reward n / 4."""
    names = [f"{experiment}-{number:03}" for number in ids]
    await store.enqueue(
        [
            Rollout(
                rollout_id=each,
                task={"question": each},
                experiment=experiment,
                retry=RETRY,
                resources={"prompt": "v2"},
                metadata={"algorithm": "grpo", "step": step},
            )
            for each in names
        ]
    )
    for status in ("failed", "succeeded"):
        claims = await store.claim(worker="w", limit=len(names), experiment=experiment)
        outcomes: list[Outcome] = []
        for claim in claims:
            rollout_id, attempt_id = claim.rollout.rollout_id, claim.attempt.attempt_id
            number = int(rollout_id.rpartition("-")[2])
            spans = (
                span(
                    rollout_id,
                    attempt_id,
                    1,
                    start_ns=1_700_000_000_000_000_000 + number,
                    end_ns=1_700_000_000_500_000_000,
                    attributes={"gen_ai.operation.name": "chat", "gen_ai.agent.name": "solver", "raw": b"x"},
                    call=call(number),
                ),
                span(rollout_id, attempt_id, 2, name="reward", reward=Reward(value=number / 4)),
            )
            error = ErrorInfo(type="ValueError", message="no") if status == "failed" else None
            outcomes.append(Outcome(attempt_id=attempt_id, status=status, error=error, spans=spans))
        await store.finish(outcomes)
    return names


async def record_context(store: Store, experiment: str = "sums") -> None:
    """Record data that rollouts refer to: versions with a score, a label that moved back, and a metric."""
    await store.publish(
        [
            ResourceVersion(name="prompt", version=f"v{number}", parent=parent, resource=PromptTemplate(template="x"))
            for number, parent in ((1, ""), (2, "v1"), (3, "v2"))
        ]
    )
    for version in ("v1", "v2", "v1"):
        await store.move_label(LabelMove(name="prompt", label="production", version=version, reason="try"))
    await store.save_scores([VersionScore(name="prompt", version="v1", mean=0.5, low=0.1, high=0.9, n=4, how="x")])
    await store.log_metrics([Metric(experiment=experiment, algorithm="grpo", step=1, name="loss", value=0.5, time=1.0)])
    await store.save_state({}, experiment=ExperimentRecord(name=experiment, live={"prompt": "v2"}, status="finished"))


async def contents(store: Store) -> Any:
    """Return the contents of a store that an archive includes, as builtin values."""
    names = [version.name for version in await store.resources()]
    found = {
        "recordings": [each async for each in read_recordings(store, ALL, spans="all")],
        "resources": [await store.resources(name) for name in names],
        "labels": await store.labels(),
        "moves": [await store.label_moves(name, "production") for name in names],
        "scores": [await store.scores(name) for name in names],
        "metrics": await store.metrics("sums"),
    }
    return msgspec.to_builtins(found)


async def archive(
    store: Store, url: str, *, is_removing: bool = False, is_dry_run: bool = False, **choice: Any
) -> Archived:
    work = Archiving(store, Place(url), choice=Choice(**choice))
    await work.survey()
    return await work.run(tell=lambda _: None, is_removing=is_removing, is_dry_run=is_dry_run)


async def restore(store: MemoryStore, url: str, *names: str, is_dry_run: bool = False) -> Restored:
    return await restore_parts(store, find_parts(Place(url), names=names), tell=lambda _: None, is_dry_run=is_dry_run)


async def ids(store: Store) -> list[str]:
    return [rollout.rollout_id for rollout in await store.rollouts(ALL)]


@pytest.fixture
def url(tmp_path) -> str:
    return str(tmp_path / "archive")
