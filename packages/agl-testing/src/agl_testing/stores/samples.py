"""Sample rollouts, spans and calls for tests of stores, and shortcuts for common sequences of operations."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from agl.contracts import Store
from agl.schemas import (
    AttemptStatus,
    Blob,
    Claim,
    ErrorInfo,
    Mode,
    ModelCall,
    Outcome,
    RetryPolicy,
    Reward,
    Rollout,
    Sampling,
    Span,
    SpanEvent,
    digest_of,
    new_rollout_id,
    new_span_id,
    pack_floats,
    pack_ids,
)

_NUMBERS = count(1)
NO_RETRY = RetryPolicy()
TWO_ATTEMPTS = RetryPolicy(max_attempts=2)
VICTIM = "victim"
"""The name of the experiment that killed child processes write to."""


def make_rollout(
    *, experiment: str = "", group_id: str = "", mode: Mode = "train", retry: RetryPolicy = NO_RETRY
) -> Rollout:
    """Create a rollout with a new id; ids sort in order of creation, even within one millisecond."""
    number = next(_NUMBERS)
    return Rollout(
        rollout_id=f"ro-{number:08d}-{new_rollout_id()[-6:]}",
        task={"question": f"{number}?", "é": [1, 2.5, None, True, {"deep": "ü"}]},
        experiment=experiment,
        group_id=group_id,
        mode=mode,
        retry=retry,
    )


def make_span(claim: Claim, *, name: str = "work", span_id: str = "", call: ModelCall | None = None) -> Span:
    """Create a span of the claimed attempt, with a value in nearly every field."""
    return Span(
        rollout_id=claim.rollout.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        span_id=span_id or new_span_id(),
        trace_id="0" * 31 + "1",
        name=name,
        kind="client",
        start_ns=1_700_000_000_000_000_000,
        end_ns=1_700_000_000_000_000_001,
        status="error",
        status_message="ä",
        attributes={"text": "x", "number": 1, "real": 0.5, "list": ["a", "b"], "none": None, "on": True},
        events=(SpanEvent(name="event", time_ns=5, attributes={"k": "v"}),),
        call=call,
    )


def make_call(prompt: Sequence[int], response: Sequence[int], *, request_id: str = "r") -> ModelCall:
    """Create a complete chat call with the given prompt and response tokens."""
    return ModelCall(
        request_id=request_id,
        dialect="chat",
        model="m",
        policy="main",
        model_version="v1",
        request={"model": "m", "messages": [{"role": "user", "content": f"{len(prompt)} tokens é"}]},
        response={"choices": [{"message": {"role": "assistant", "content": f"{len(response)}"}}]},
        sampling=Sampling(temperature=0.5, stop=("a", "b")),
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(response),
        logprobs=pack_floats(-index / 8 for index in range(len(response))),
        finish_reason="stop",
        latency_s=0.25,
    )


def make_blob(text: str) -> Blob:
    """Create a blob whose content is ``text``."""
    data = text.encode()
    return Blob(digest=digest_of(data), media_type="image/png", data=data)


def make_reward_span(rollout_id: str, attempt_id: str, value: float) -> Span:
    """Create the span of a person's reward for the whole rollout."""
    reward = Reward(value=value, name="human", dimensions={"style": 0.5, "none": None}, source="human", feedback="ok")
    return Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="evaluate", reward=reward)


def outcome_of(claim: Claim, status: AttemptStatus = "succeeded", *, spans: Sequence[Span] = ()) -> Outcome:
    """Create an outcome of the claimed attempt, with an error unless the status is ``succeeded``."""
    error = None if status == "succeeded" else ErrorInfo(type="ValueError", message="no", traceback="line 1")
    return Outcome(attempt_id=claim.attempt.attempt_id, status=status, error=error, spans=tuple(spans))


async def claim_one(store: Store, *, lease_s: float = 60.0, wait_s: float = 0.0, claim_id: str = "") -> Claim:
    """Claim exactly one rollout."""
    claims = await store.claim(worker="w", lease_s=lease_s, wait_s=wait_s, claim_id=claim_id)
    assert 1 == len(claims)
    return claims[0]


async def start_one(store: Store, rollout: Rollout | None = None, *, lease_s: float = 60.0) -> Claim:
    """Enqueue a rollout and claim it."""
    await store.enqueue([rollout or make_rollout()])
    return await claim_one(store, lease_s=lease_s)


async def finish_one(store: Store, *, status: AttemptStatus = "succeeded", spans: int = 0) -> Rollout:
    """Run a rollout to its end."""
    claim = await start_one(store)
    outcome = outcome_of(claim, status, spans=[make_span(claim) for _ in range(spans)])
    return (await store.finish([outcome]))[0]


async def until(condition: Callable[[], Awaitable[bool]], *, store: Store, limit_s: float = 10.0) -> None:
    """Wait until ``condition`` holds, checking it after each change; raises TimeoutError after ``limit_s`` seconds."""
    cursor = 0
    async with asyncio.timeout(limit_s):
        while not await condition():
            seen = await store.changes(after=cursor, wait_s=1.0)
            cursor = seen[-1].cursor if seen else cursor
