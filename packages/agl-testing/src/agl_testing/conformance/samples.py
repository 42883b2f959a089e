"""Sample rollouts, spans and episodes, for tests of components that read finished rollouts."""

import random
from collections.abc import Sequence

from agl import semconv
from agl.schemas import (
    Attempt,
    CallCredit,
    Episode,
    Json,
    ModelCall,
    Reward,
    Rollout,
    Row,
    Segment,
    Span,
    SpanStatus,
    Transition,
    new_rollout_id,
    new_span_id,
    pack_floats,
    pack_ids,
)
from agl_testing.model_server.codec import ConversationTurn, encode, logprob, render_prompt


class FinishedCredit:
    """Credits a rollout's calls with its reward, except for the last call, which gets a final advantage of 0.5."""

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Return the credit of each call, in one list per episode."""
        return [[*self._shared(episode), self._finished(episode)] for episode in group]

    def _shared(self, episode: Episode) -> list[CallCredit]:
        reward = episode.reward or 0.0
        return [CallCredit(span_id=call.span_id, value=reward, baseline="b") for call in episode.transitions[:-1]]

    def _finished(self, episode: Episode) -> CallCredit:
        return CallCredit(span_id=episode.transitions[-1].span_id, value=0.5, baseline="", is_advantage=True)


def rollout_of(task: Json, *, group_id: str = "group") -> Rollout:
    """Return a succeeded rollout of ``task``, whose field ``answer`` is hidden."""
    rollout_id = new_rollout_id()
    return Rollout(
        rollout_id=rollout_id,
        task=task,
        group_id=group_id,
        hidden=("answer",),
        status="succeeded",
        attempts=1,
        attempt_id=f"{rollout_id}.1",
    )


def chat_span(rollout: Rollout, *, text: str, agent: str = "") -> Span:
    """Return the span of a model call that answered ``text``, with token ids and log-probabilities."""
    turn = ConversationTurn(role="user", text="what is 6 * 7?")
    ids = encode(text)
    call = ModelCall(
        request_id=new_span_id(),
        dialect="chat",
        model="m",
        request={"model": "m", "messages": [{"role": turn.role, "content": turn.text}]},
        response={
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]
        },
        prompt_ids=pack_ids(render_prompt([turn])),
        response_ids=pack_ids(ids),
        logprobs=pack_floats(logprob(token, position) for position, token in enumerate(ids)),
        finish_reason="stop",
    )
    attributes = {semconv.OPERATION: semconv.OP_CHAT, **({semconv.AGENT_NAME: agent} if agent else {})}
    return _span(rollout, "chat m", attributes=attributes, call=call)


def tool_span(rollout: Rollout, *, status: SpanStatus = "ok") -> Span:
    """Return the span of a tool's execution."""
    attributes: dict[str, Json] = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: "calc"}
    return _span(rollout, "execute_tool calc", attributes=attributes, status=status)


def error_span(rollout: Rollout) -> Span:
    """Return the span of an exception."""
    return _span(rollout, "exception ValueError", attributes={semconv.ERROR_TYPE: "ValueError"}, status="error")


def make_group(draw: random.Random, *, size: int = 4) -> list[Episode]:
    """Return episodes of one task, each with a reward, and with random agents, calls, reject reasons and rows."""
    group_id = f"task-{draw.randrange(1_000_000)}"
    return [make_episode(draw, group_id=group_id) for _ in range(size)]


def make_episode(draw: random.Random, *, group_id: str) -> Episode:
    """Return a random episode with up to six calls of up to three agents; each row holds one call."""
    rollout = rollout_of({"question": "?"}, group_id=group_id)
    transitions = [_transition(draw, rollout, turn) for turn in range(draw.randrange(7))]
    value = round(draw.uniform(-1, 1), 3)
    return Episode(
        rollout=rollout,
        attempt=Attempt(attempt_id=f"{rollout.rollout_id}.1", rollout_id=rollout.rollout_id, number=1, worker="w"),
        reward=value,
        rewards=(Reward(value=value), Reward(value=1.0, name="style")),
        transitions=tuple(transitions),
        rows=tuple(_row(rollout, call) for call in transitions if not call.reject),
    )


def sampled_episode(
    rollout: Rollout, *, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], reward: float
) -> Episode:
    """Return the episode of a rollout with one model call, for algorithms that train weights.

    ``prompt`` and ``answer`` are token ids; ``logprobs`` are those of the answer's tokens, in nats.
    """
    attempt_id = rollout.attempt_id or ""
    call = Transition(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        span_id=f"{rollout.rollout_id}/0",
        branch=0,
        start=len(prompt),
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(answer),
        logprobs=pack_floats(logprobs),
    )
    return Episode(rollout=rollout, attempt=None, reward=reward, transitions=(call,), rows=(_row(rollout, call),))


def _transition(draw: random.Random, rollout: Rollout, turn: int) -> Transition:
    is_rejected = draw.random() < 0.2
    response = [draw.randrange(99) for _ in range(draw.randrange(1, 5))]
    return Transition(
        rollout_id=rollout.rollout_id,
        attempt_id=f"{rollout.rollout_id}.1",
        span_id=new_span_id(),
        agent=draw.choice(["write", "check", ""]),
        turn=turn,
        branch=-1 if is_rejected else turn,
        start=-1 if is_rejected else 3,
        prompt_ids=pack_ids([1, 2, 3]),
        response_ids=pack_ids(response),
        logprobs=pack_floats(-0.5 for _ in response),
        reward=draw.choice([None, None, 0.5, -0.25]),
        reject="incomplete" if is_rejected else "",
    )


def _row(rollout: Rollout, call: Transition) -> Row:
    start, length = len(call.prompt_ids) // 4, len(call.response_ids) // 4
    return Row(
        rollout_id=rollout.rollout_id,
        attempt_id=call.attempt_id,
        group_id=rollout.group_id,
        branch=call.branch,
        ids=call.prompt_ids + call.response_ids,
        mask=b"\x00" * start + b"\x01" * length,
        logprobs=pack_floats([0.0] * start) + call.logprobs,
        segments=(Segment(start=start, stop=start + length, span_id=call.span_id, agent=call.agent),),
    )


def _span(
    rollout: Rollout,
    name: str,
    *,
    attributes: dict[str, Json],
    status: SpanStatus = "ok",
    call: ModelCall | None = None,
    rewards: Sequence[Reward] = (),
) -> Span:
    return Span(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt_id or "",
        span_id=new_span_id(),
        name=name,
        start_ns=1,
        end_ns=2,
        status=status,
        attributes=attributes,
        call=call,
        reward=rewards[0] if rewards else None,
    )
