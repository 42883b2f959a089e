"""Answers that were cut at a limit of tokens or came near it: left out of the loss, punished, and counted.

Both are DAPO's (Yu et al. 2025, arXiv 2503.14476). Overlong filtering (section 3.4) leaves cut answers out of the loss.
The soft overlong punishment (equation 13) takes up to `penalty_factor` = f off the reward of long ones. With L tokens
in an answer, L_max = `max_resp_len` and L_cache = `overlong_buffer_cfg.len`

    0                                       where L <= L_max - L_cache
    f * ((L_max - L_cache) - L) / L_cache   where L_max - L_cache < L <= L_max
    -f                                      where L > L_max

Deviations from VERL's reward manager `dapo`, and why:
- An answer is a call, not a whole rollout: what credit gave that call is punished, and no other call pays for it.
- Beyond L_max the punishment stays at -f. VERL's grows on, but its answers end at L_max.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agl.schemas import CallCredit, Episode
    from agl_algo_verl.settings import RewardKwargsKeys


def punished(episode: Episode, credits: Sequence[CallCredit], *, settings: RewardKwargsKeys) -> list[CallCredit]:
    """Return what credit gave the calls of an episode, less the punishment for the lengths of their answers."""
    if not settings.overlong_buffer_cfg.enable:
        return list(credits)
    tokens = {call.span_id: len(call.response_ids) // 4 for call in episode.transitions}  # packed int32
    return [
        replace(credit, value=credit.value + punishment(tokens[credit.span_id], settings=settings))
        for credit in credits
    ]


def punishment(tokens: int, *, settings: RewardKwargsKeys) -> float:
    """Return what an answer of so many tokens loses, from `-penalty_factor` to 0."""
    buffer = settings.overlong_buffer_cfg
    free = (settings.max_resp_len or 0) - buffer.len
    return buffer.penalty_factor * max(-1.0, min(0.0, (free - tokens) / buffer.len))


def without_truncated(episode: Episode, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values, by span id, of the calls that were not cut at a limit of tokens; no others are trained.

    DAPO leaves out the whole sample, which is one answer; here that is the call, and the rollout's other calls train.
    """
    cut = {call.span_id for call in episode.transitions if call.is_truncated}
    return {span_id: value for span_id, value in values.items() if span_id not in cut}


def rollout_shares(episodes: Sequence[Episode], *, dropped: int, loud: Collection[str]) -> dict[str, float]:
    """Return the shares of rollouts with a cut call, of dropped ones, and of kept ones that train nothing.

    `loud` are the ids of those that have a gradient; `dropped` counts those that were not handed over.
    """
    cut = sum(any(call.is_truncated and not call.reject for call in episode.transitions) for episode in episodes)
    silent = sum(episode.rollout.rollout_id not in loud for episode in episodes)
    kept = max(1, len(episodes))
    return {
        "truncated_share": cut / kept,
        "dropped_share": dropped / max(1, dropped + len(episodes)),
        "silent_share": silent / kept,
    }
