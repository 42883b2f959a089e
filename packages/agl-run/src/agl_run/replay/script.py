"""Loads the answers of recorded rollouts from the store, before a replay starts its agent."""

from collections.abc import Sequence

from agl.contracts import ForkPlan, Store, fork_of, replay_of
from agl.errors import NotFoundError, RunError
from agl.schemas import Rollout
from agl.stores import all_spans
from agl_inspect.rollouts.answers import RecordedAnswer, recorded_answers
from agl_run.replay.fork_player import ForkScript
from agl_run.replay.player import ReplayScript

Script = ReplayScript | ForkScript
"""The script of a replay or a fork: its plan and the recorded answers that it needs."""


async def load_script(store: Store, rollout: Rollout) -> Script | None:
    """Load the script of a replay or a fork; return ``None`` for any other rollout.

    Raises:
        RunError: A rollout whose answers are needed is no longer in the store, or lacks the call at which to fork.
    """
    # The plan is in the rollout's metadata, so any worker can load it.
    if (fork := fork_of(rollout)) is not None:
        return await _fork_script(store, fork)
    plan = replay_of(rollout)
    if plan is None:
        return None
    return ReplayScript(
        plan=plan,
        recorded=await _answers(store, plan.rollout_id),
        sibling=await _answers(store, plan.sibling) if plan.sibling else (),
    )


async def _fork_script(store: Store, plan: ForkPlan) -> ForkScript:
    recorded = await _answers(store, plan.rollout_id)
    position = _position(recorded, plan.rollout_id, plan.span_id)
    if not plan.answer_rollout:
        return ForkScript(plan=plan, position=position, recorded=recorded)
    others = await _answers(store, plan.answer_rollout)
    answer = others[_position(others, plan.answer_rollout, plan.answer_span)]
    if answer.dialect != recorded[position].dialect:
        raise RunError(
            f"the rollout {plan.rollout_id} was to fork with an answer of {plan.answer_rollout}, and one asked by "
            f"{recorded[position].dialect}, the other by {answer.dialect}; fork with answers of the same API"
        )
    return ForkScript(plan=plan, position=position, recorded=recorded, answer=answer)


def _position(answers: Sequence[RecordedAnswer], rollout_id: str, span_id: str) -> int:
    found = next((position for position, answer in enumerate(answers) if span_id in answer.span_ids), None)
    if found is None:
        raise RunError(
            f"the rollout {rollout_id} has no answered model call with the span {span_id!r}, so nothing can fork "
            f"there; agl replay --fork {rollout_id} lists the calls that it has"
        )
    return found


async def _answers(store: Store, rollout_id: str) -> tuple[RecordedAnswer, ...]:
    try:
        return recorded_answers(await all_spans(store, rollout_id))
    except NotFoundError as error:
        raise RunError(
            f"rollout {rollout_id!r} is to be replayed and is no longer in the store; keep it until its replays ran"
        ) from error
