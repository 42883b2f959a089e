"""Reports how a step used every recorded call, for ``agl why``."""

from collections.abc import Collection, Mapping

from agl.contracts import CallUse
from agl.schemas import Episode

_SILENT = "no gradient: every advantage of its group is 0"
_REPLACED = "silent, dropped: every advantage of its group is 0, and the step took further tasks in its place (refill)"
_NO_CREDIT = "the credit gave it no number"


def call_uses(
    episode: Episode, *, credits: Mapping[str, float], advantages: Mapping[str, float], loud: Collection[str]
) -> tuple[CallUse, ...]:
    """Return the use of every call of an episode, in its order.

    Args:
        episode: The rollout.
        credits: What the credit assignment gave its calls, by span id.
        advantages: Their advantages; a call without one did not train.
        loud: Tasks with a gradient, by group id.
    """
    silent = "" if episode.rollout.group_id in loud else _SILENT
    uses: list[CallUse] = []
    for call in episode.transitions:
        is_trained = call.span_id in advantages and not call.reject
        uses.append(
            CallUse(
                span_id=call.span_id,
                row=call.branch if is_trained else -1,
                credit=credits.get(call.span_id),
                advantage=advantages.get(call.span_id) if is_trained else None,
                note=silent if is_trained else call.reject or _NO_CREDIT,
            )
        )
    return tuple(uses)


def replaced_uses(episode: Episode) -> tuple[CallUse, ...]:
    """Return the uses of the calls of a rollout whose group was replaced."""
    return tuple(
        CallUse(span_id=call.span_id, row=-1, credit=None, advantage=None, note=call.reject or _REPLACED)
        for call in episode.transitions
    )
