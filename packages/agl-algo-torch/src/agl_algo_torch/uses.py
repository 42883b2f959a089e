"""Reports what a step did with every recorded call of the rollouts that it looked at, for `agl why`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl.contracts import CallUse

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agl.schemas import Episode
    from agl_algo_torch.batch import RowSample

SILENT = "no gradient: every advantage of its group is 0"
CUT = "its answer was cut at a limit of tokens"
NO_CREDIT = "the credit gave it no number"


def call_uses(
    episode: Episode,
    *,
    trained: Collection[str],
    credits: Mapping[str, float] | None = None,
    advantages: Mapping[str, float] | None = None,
    note: str = "",
    left_out: str = "",
) -> tuple[CallUse, ...]:
    """Return the use of every call of an episode, in its order.

    Args:
        episode: The rollout.
        trained: Span ids of the calls that the step trained on.
        credits: What the credit assignment gave, by span id.
        advantages: The advantages, by span id.
        note: Said of trained calls.
        left_out: Why calls that could train were left out; by default what `credits` says about each.
    """
    credits, advantages = credits or {}, advantages or {}
    uses: list[CallUse] = []
    for call in episode.transitions:
        span_id = call.span_id
        is_trained = span_id in trained and not call.reject
        reason = call.reject or left_out or (CUT if span_id in credits else NO_CREDIT)
        uses.append(
            CallUse(
                span_id=span_id,
                row=call.branch if is_trained else -1,
                credit=credits.get(span_id),
                advantage=advantages.get(span_id) if is_trained else None,
                note=note if is_trained else reason,
            )
        )
    return tuple(uses)


def group_uses(
    groups: Sequence[Sequence[Episode]],
    samples: Sequence[RowSample],
    *,
    credits: Sequence[Mapping[str, float]],
    advantages: Sequence[Mapping[str, float]],
) -> dict[str, tuple[CallUse, ...]]:
    """Return the uses by rollout id; `credits` and `advantages` are those of each episode, in order of `groups`.

    A call trains if it has an advantage. Groups without a gradient are named as silent.
    """
    loud = {sample.rollout for sample in samples if not sample.is_silent}
    placed = [(episode, group) for group in groups for episode in group]
    notes = {id(group): "" if any(e.rollout.rollout_id in loud for e in group) else SILENT for group in groups}
    return {
        episode.rollout.rollout_id: call_uses(
            episode, trained=by_span, credits=given, advantages=by_span, note=notes[id(group)]
        )
        for (episode, group), given, by_span in zip(placed, credits, advantages, strict=True)
    }
