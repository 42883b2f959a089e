"""Reports what a step did with every recorded call of its rollouts, for `agl why`."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING

from agl.contracts import CallUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl.schemas import CallCredit, Episode, Transition
    from agl_algo_verl.rows import RowSample

SILENT = "no gradient: every advantage of its group is 0"
CUT = "its answer was cut at a limit of tokens"
NO_CREDIT = "the credit gave it no number"


def rollout_uses(
    groups: Sequence[Sequence[Episode]],
    samples: Sequence[RowSample],
    *,
    credits: Sequence[Sequence[CallCredit]],
    advantages: Sequence[Mapping[str, float]] | None,
    refused: Mapping[str, Mapping[str, str]],
) -> dict[str, tuple[CallUse, ...]]:
    """Return the use of every call by rollout id.

    Args:
        groups: The episodes that share a task.
        samples: The rows that are trained.
        credits: What credit gave the calls of each episode, in order of `groups`.
        advantages: The advantages of each episode's calls by span id; None where there is none per call.
        refused: Why a row is left out, by rollout and span id of its calls.
    """
    trained: defaultdict[str, set[str]] = defaultdict(set)
    for sample in samples:
        trained[sample.rollout].update(span_id for span_id, _, _ in sample.calls)
    found = advantages or [{} for _ in credits]
    given = iter(zip(credits, found, strict=True))
    uses: dict[str, tuple[CallUse, ...]] = {}
    for group in groups:
        numbers = [({c.span_id: c.value for c in calls}, values) for calls, values in islice(given, len(group))]
        own = [trained[episode.rollout.rollout_id] for episode in group]
        is_loud = any(values[each] for (_, values), ids in zip(numbers, own, strict=True) for each in ids if values)
        note = "" if is_loud or advantages is None else SILENT
        for episode, (credit, values), ids in zip(group, numbers, own, strict=True):
            rollout = episode.rollout.rollout_id
            uses[rollout] = tuple(
                _trained(call, credit=credit, advantages=values, note=note)
                if call.span_id in ids
                else _left_out(call, credit=credit, refused=refused.get(rollout, {}))
                for call in episode.transitions
            )
    return uses


def _trained(call: Transition, *, credit: Mapping[str, float], advantages: Mapping[str, float], note: str) -> CallUse:
    """Return the use of a call whose tokens are trained."""
    return CallUse(
        span_id=call.span_id,
        row=call.branch,
        credit=credit.get(call.span_id),
        advantage=advantages.get(call.span_id),
        note=note,
    )


def _left_out(call: Transition, *, credit: Mapping[str, float], refused: Mapping[str, str]) -> CallUse:
    """Return the use of a call that is not trained, with the reason."""
    reason = call.reject or refused.get(call.span_id) or (CUT if call.span_id in credit else NO_CREDIT)
    return CallUse(span_id=call.span_id, credit=credit.get(call.span_id), note=reason)
