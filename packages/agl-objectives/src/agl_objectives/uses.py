"""Builds the records of how a step used every call of its rollouts, for `agl why`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl.contracts import CallUse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from agl.schemas import Episode

__all__ = ["CUT", "NO_CREDIT", "SILENT", "call_uses", "group_uses", "rollout_uses"]

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
    refused: Mapping[str, str] | None = None,
) -> tuple[CallUse, ...]:
    """Return the use of every call of an episode, in order.

    Args:
        episode: The rollout.
        trained: Span ids of the calls that the step trained on.
        credits: The credit of calls, by span id.
        advantages: The advantages of calls, by span id.
        note: The note on trained calls.
        left_out: Why calls that could train did not. By default a call with credit counts as cut (`CUT`), and one
            without as `NO_CREDIT`.
        refused: Why the row of a call was left out, by span id.
    """
    credits, advantages, refused = credits or {}, advantages or {}, refused or {}
    uses: list[CallUse] = []
    for call in episode.transitions:
        span_id = call.span_id
        is_trained = span_id in trained and not call.reject
        reason = call.reject or refused.get(span_id) or left_out or (CUT if span_id in credits else NO_CREDIT)
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


def rollout_uses(
    episodes: Iterable[Episode], notes: Mapping[str, str], *, left_out: str
) -> dict[str, tuple[CallUse, ...]]:
    """Return the uses of calls by rollout id, for an algorithm that trains on whole rollouts.

    `notes` has a note for the id of every rollout that trains; the calls of the others get the reason `left_out`.
    """
    uses: dict[str, tuple[CallUse, ...]] = {}
    for episode in episodes:
        rollout = episode.rollout.rollout_id
        trained = {call.span_id for call in episode.transitions} if rollout in notes else ()
        uses[rollout] = call_uses(episode, trained=trained, note=notes.get(rollout, ""), left_out=left_out)
    return uses


def group_uses(
    groups: Sequence[Sequence[Episode]],
    *,
    trained: Sequence[Collection[str]],
    loud: Collection[str],
    credits: Sequence[Mapping[str, float]],
    advantages: Sequence[Mapping[str, float]] | None,
    refused: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, tuple[CallUse, ...]]:
    """Return the uses of calls by rollout id; the calls of groups without a gradient get the note `SILENT`.

    `trained`, `credits` and `advantages` have one element per episode, in the order of `groups`.

    Args:
        groups: The episodes of each task.
        trained: Span ids of the calls that the step trained on.
        loud: Ids of the rollouts that have a gradient.
        credits: The credit of calls, by span id.
        advantages: The advantages of calls, by span id; None if calls have no single advantage.
        refused: Why the row of a call was left out, by rollout id and span id.
    """
    notes = [
        SILENT if advantages is not None and not any(e.rollout.rollout_id in loud for e in group) else ""
        for group in groups
        for _ in group
    ]
    episodes = [episode for group in groups for episode in group]
    values = [None] * len(episodes) if advantages is None else advantages
    return {
        episode.rollout.rollout_id: call_uses(
            episode,
            trained=own,
            credits=given,
            advantages=found,
            note=note,
            refused=(refused or {}).get(episode.rollout.rollout_id),
        )
        for episode, own, given, found, note in zip(episodes, trained, credits, values, notes, strict=True)
    }
