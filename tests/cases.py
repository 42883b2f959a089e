"""Spans of a small attempt, with known tokens and times, for the tests of training data."""

from typing import Any

from agl.schemas import Attempt, ModelCall, Reward, Rollout, Span, pack_floats, pack_ids

ROLLOUT = Rollout(rollout_id="r", task={"question": "?"}, group_id="g", status="succeeded", attempts=1)
ATTEMPT = Attempt(attempt_id="r.1", rollout_id="r", number=1, worker="w", status="succeeded")


def call_span(
    number: int,
    *,
    prompt: tuple[int, ...] = (1,),
    response: tuple[int, ...] = (2,),
    parent: str | None = None,
    attempt_id: str = "r.1",
    is_late: bool = False,
    attributes: dict[str, Any] | None = None,
    **call: Any,
) -> Span:
    """Return the span of a model call.

    Its id is ``c<number>``, its sequence is ``number`` and it starts at ``10 * number`` ns. The log-probability of
    token k of the response is -number - k/4, so every token of every call has one of its own.
    """
    given: dict[str, Any] = {
        "request_id": f"q{number}",
        "dialect": "chat",
        "model": "m",
        "policy": "p",
        "prompt_ids": pack_ids(prompt),
        "response_ids": pack_ids(response),
        "logprobs": pack_floats(-number - k / 4 for k in range(len(response))),
    }
    return Span(
        rollout_id="r",
        attempt_id=attempt_id,
        span_id=f"c{number}",
        parent_id=parent,
        name="chat m",
        sequence=number,
        start_ns=number * 10,
        end_ns=number * 10 + 5,
        is_late=is_late,
        attributes=attributes or {},
        call=ModelCall(**{**given, **call}),
    )


def plain_span(span_id: str, *, parent: str | None = None, start: int = 1, end: int = 10**6, **fields: Any) -> Span:
    """Return a span that is no model call; ``start`` and ``end`` are in the unit of :func:`call_span`'s number."""
    given: dict[str, Any] = {"name": span_id, "sequence": start, "attributes": {}, "attempt_id": "r.1", **fields}
    return Span(rollout_id="r", span_id=span_id, parent_id=parent, start_ns=start * 10, end_ns=end * 10, **given)


def agent_span(name: str, *, parent: str | None = None) -> Span:
    """Return the span of an agent; its id is the agent's name."""
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return plain_span(name, parent=parent, attributes=attributes)


def reward_span(
    number: int, value: float | None, *, parent: str | None = None, is_late: bool = False, **reward: Any
) -> Span:
    """Return the span ``w<number>`` of a reward, just after the call of that number has ended."""
    return Span(
        rollout_id="r",
        attempt_id=reward.pop("attempt_id", "r.1"),
        span_id=f"w{number}",
        parent_id=parent,
        name="evaluate",
        sequence=number,
        start_ns=number * 10 + 7,
        end_ns=number * 10 + 7,
        is_late=is_late,
        reward=Reward(value=value, **reward),
    )
