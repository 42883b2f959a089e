"""Names the call of a recorded rollout that a fork goes on from, and counts the answers by their source."""

from collections.abc import Iterable

from agl.contracts import DIVERGED, REPLAY_VERSION, Store, fork_of
from agl.errors import AglError, NotFoundError
from agl.schemas import Record, Rollout
from agl.stores import all_spans
from agl_inspect.rollouts.recorded import recorded_answers


class AnswerCounts(Record, frozen=True, kw_only=True):
    """Numbers of calls: answered from a recording or made up for a replay, by a model, and refused as a divergence."""

    replayed: int = 0
    live: int = 0
    refused: int = 0


def answer_counts(model_versions: Iterable[str]) -> AnswerCounts:
    """Count the calls of a rollout by the model versions that answered them."""
    versions = list(model_versions)
    refused = versions.count(DIVERGED)
    replayed = sum(version.startswith(REPLAY_VERSION) for version in versions) - refused
    return AnswerCounts(replayed=replayed, live=len(versions) - replayed - refused, refused=refused)


async def fork_origin(store: Store, rollout: Rollout) -> str:
    """Describe the recorded rollout and the call that a fork goes on from; ``""`` for a rollout that is no fork."""
    try:
        plan = fork_of(rollout)
    except AglError:  # metadata of the user's own
        return ""
    if plan is None:
        return ""
    try:
        calls = recorded_answers(await all_spans(store, plan.rollout_id))
    except NotFoundError:
        return f"{plan.rollout_id}, which is no longer recorded"
    for number, call in enumerate(calls, start=1):
        if plan.span_id in call.span_ids:
            return f"{plan.rollout_id} from call {number}{f' by {call.agent}' if call.agent else ''} on"
    return f"{plan.rollout_id} from a call on that is no longer recorded"
