"""Loads the answers of recorded rollouts from the store, before a replay starts its agent."""

from collections.abc import Sequence

from agl.contracts import Store
from agl.episodes import Enclosing, chronological, is_answered
from agl.errors import NotFoundError, RunError
from agl.schemas import ModelCall, Rollout, Span
from agl.stores import all_spans
from agl_run.replay.answers import answer_of, exchanges_of
from agl_run.replay.plan import replay_of
from agl_run.replay.player import RecordedAnswer, ReplayScript


async def load_script(store: Store, rollout: Rollout) -> ReplayScript | None:
    """Load the script of a replay, ``None`` for any other rollout.

    Raises :class:`RunError` if a rollout that it replays is gone.
    """
    plan = replay_of(rollout)
    if plan is None:
        return None
    return ReplayScript(
        plan=plan,
        recorded=await _answers(store, plan.rollout_id),
        sibling=await _answers(store, plan.sibling) if plan.sibling else (),
    )


async def _answers(store: Store, rollout_id: str) -> tuple[RecordedAnswer, ...]:
    try:
        return recorded_answers(await all_spans(store, rollout_id))
    except NotFoundError as error:
        raise RunError(
            f"rollout {rollout_id!r} is to be replayed and is no longer in the store; keep it until its replays ran"
        ) from error


def recorded_answers(spans: Sequence[Span]) -> tuple[RecordedAnswer, ...]:
    """Return the complete answers of one attempt in order of time; the last one of a retried request."""
    timeline = chronological(spans)
    enclosing = Enclosing(timeline.spans)
    calls = {id(span.call): span for span in timeline.spans if span.call and is_answered(span.call)}
    kept: dict[str, list[ModelCall]] = {}
    for exchange in exchanges_of([span.call for span in calls.values() if span.call]):
        kept[exchange[0].request_id or calls[id(exchange[0])].span_id] = exchange
    return tuple(
        RecordedAnswer(
            agent=enclosing.who(calls[id(exchange[0])]).agent,
            dialect=exchange[0].dialect,
            request=exchange[0].request,
            response=answer,
        )
        for exchange in kept.values()
        if exchange[0].dialect != "embeddings" and (answer := answer_of(exchange)) is not None
    )
