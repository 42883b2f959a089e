"""Credit ``turn``: discounted returns over the turns of an episode.

All values are returns, not advantages. An algorithm's estimator compares the values that share a ``baseline`` key, and
each rollout counts once in its statistics. The keys therefore name tasks or turns, never single calls.
"""

from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Annotated, Literal

import msgspec

from agl.schemas import CallCredit, Episode, Transition
from agl_rewards.credit.episodes import final_of, group_of, live_calls

Discount = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""Discount per turn, from 0 to 1."""


class TurnCredit:
    """Discounted returns over the turns of an episode; the turns are all agents' calls in order of time.

    With r_t the reward of turn t and R the episode's reward, which is earned at the last turn T,

        G_T = r_T + R,    G_t = r_t + gamma * G_{t+1}

    All choices of one request are one turn: each choice gets its own reward and the same future. A rejected call is not
    a turn: its reward counts for the turns before it, discounted like the reward of the turn after it, and after the
    last turn it is added to R. A rejected choice that another choice of its request follows belongs to that turn, and
    its reward counts only for earlier turns.

    Args:
        gamma: Discount per turn, in [0, 1].
        baseline: ``group`` compares a rollout's mean return with the other rollouts of its task. ``turn`` compares
            an agent's turn with the same turn in the other rollouts. This is finer, but a turn that only one rollout
            reaches is then compared with nothing.
    """

    def __init__(self, *, gamma: Discount = 1.0, baseline: Literal["group", "turn"] = "group") -> None:
        self._gamma = gamma
        self._baseline = baseline

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Return the credit of each call, in one list per episode and in order of time.

        Raises:
            ConfigError: An episode with calls to train on has no reward at all.
        """
        return [self._assign(episode) for episode in group]

    def _assign(self, episode: Episode) -> list[CallCredit]:
        live = live_calls(episode)
        if not live:
            return []
        final = final_of(episode, has_other=any(call.reward is not None for call in episode.transitions))
        values = discounted_returns(episode.transitions, final=final, gamma=self._gamma)
        return [
            CallCredit(span_id=call.span_id, value=values[call.span_id], baseline=self._key(episode, call))
            for call in live
        ]

    def _key(self, episode: Episode, call: Transition) -> str:
        """Return the baseline key of a call: the group or, with ``baseline = "turn"``, the group, agent and turn."""
        group = group_of(episode)
        return group if self._baseline == "group" else f"{group}/{call.agent}/{call.turn}"


def discounted_returns(calls: Sequence[Transition], *, final: float, gamma: float) -> dict[str, float]:
    """Return the discounted return of every call that is not rejected, by span id.

    Args:
        calls: The calls in order of time.
        final: R, which is earned at the last turn.
        gamma: Discount per turn.
    """
    values: dict[str, float] = {}
    # From the end: ``future`` is G_{t+1}; for the last turn it is R, without discount.
    future, is_last = final, True
    # Neighbours with one agent and one turn number are the choices of one request, rejected ones included.
    for _, step in groupby(reversed(calls), key=lambda call: (call.agent, call.turn)):
        members = list(step)
        behind = list(takewhile(lambda call: bool(call.reject), members))
        # Rejected calls at the end form no turn, so their rewards join the later return without a discount.
        future += _earned(behind)
        choices = members[len(behind) :]
        if not choices:
            continue
        later = future if is_last else gamma * future
        # G_t = r_t + gamma G_{t+1}, with each choice's own r_t
        values.update((call.span_id, (call.reward or 0.0) + later) for call in choices if not call.reject)
        future, is_last = _earned(choices) + later, False  # the turn as a whole earned what all its choices did
    return values


def _earned(calls: Sequence[Transition]) -> float:
    return sum(call.reward or 0.0 for call in calls)
