"""Leaves out of the loss, punishes, and counts answers that were cut at a limit of tokens or came near it.

Both remedies are DAPO's (Yu et al. 2025, arXiv 2503.14476). Overlong filtering (section 3.4) leaves cut answers out of
the loss. The soft overlong punishment (equation 13) lowers the reward of long answers before they reach the limit. An
answer of L tokens gets, with L_max = `limit`, L_cache = `buffer` and f = `factor`, which is 1 in the paper:

    0                                       where L <= L_max - L_cache
    f * ((L_max - L_cache) - L) / L_cache   where L_max - L_cache < L <= L_max
    -f                                      where L > L_max

Deviation from the paper: a sample of the paper is one answer. Here an answer is a call, and a rollout has several. Only
the cut call is left out, and the punishment is added to the credit of the long call alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agl.schemas import CallCredit, Episode
    from agl_objectives.settings import GroupSampling

__all__ = ["SoftOverlong", "overlong_punishment", "rollout_shares", "without_truncated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftOverlong:
    """The punishment of calls with more than `limit - buffer` tokens.

    Attributes:
        limit: Number of tokens from which on the punishment is `factor`; 0 turns it off.
        buffer: Number of tokens before the limit over which the punishment grows.
        factor: Largest punishment.
    """

    limit: int = 0
    buffer: int = 0
    factor: float = 1.0

    def punishment(self, tokens: int) -> float:
        """Return the change of the credit of an answer with this number of tokens, from `-factor` to 0."""
        if not self.limit:
            return 0.0
        free = self.limit - self.buffer
        return self.factor * max(-1.0, min(0.0, (free - tokens) / self.buffer))

    def applied(self, episode: Episode, credits: Sequence[CallCredit]) -> list[CallCredit]:
        """Return the credits of an episode's calls, each lowered by the punishment of the call's answer."""
        if not self.limit:
            return list(credits)
        tokens = {call.span_id: len(call.response_ids) // 4 for call in episode.transitions}  # packed int32
        return [
            msgspec.structs.replace(credit, value=credit.value + self.punishment(tokens[credit.span_id]))
            for credit in credits
        ]


def overlong_punishment(sampling: GroupSampling) -> SoftOverlong:
    """Make the punishment of long answers from an algorithm's settings."""
    return SoftOverlong(limit=sampling.overlong_limit, buffer=sampling.overlong_buffer)


def without_truncated(episode: Episode, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values, by span id, of the calls that were not cut at a limit of tokens."""
    cut = {call.span_id for call in episode.transitions if call.is_truncated}
    return {span_id: value for span_id, value in values.items() if span_id not in cut}


def rollout_shares(episodes: Sequence[Episode], *, dropped: int, loud: Collection[str]) -> dict[str, float]:
    """Return as metrics the shares of rollouts with a cut call, of dropped rollouts, and of silent rollouts.

    Args:
        episodes: The rollouts of a step that were not dropped.
        dropped: Number of rollouts that were dropped.
        loud: Ids of the rollouts that have a gradient.
    """
    cut = sum(any(call.is_truncated and not call.reject for call in episode.transitions) for episode in episodes)
    silent = sum(episode.rollout.rollout_id not in loud for episode in episodes)
    kept = max(1, len(episodes))
    return {
        "truncated_share": cut / kept,
        "dropped_share": dropped / max(1, dropped + len(episodes)),
        "silent_share": silent / kept,
    }
