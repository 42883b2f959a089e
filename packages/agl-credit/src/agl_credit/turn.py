"""Credit ``turn``: discounted returns over the turns of an episode.

All values are returns, not advantages; an algorithm's estimator compares those with one ``baseline`` key, each rollout
counting once in its statistics. The keys therefore name tasks or turns, never single calls.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Transition
from agl_credit.episodes import final_of, group_of, live_calls


class TurnCredit:
    """Discounted returns over the turns of an episode, all its agents' calls in order of time.

    With r_t the reward of turn t and R the episode's reward, which is earned at the last turn T,
    G_T = r_T + R and G_t = r_t + gamma * G_{t+1}. Choices of one request are one turn: each gets its own reward
    and the same future. A rejected call is no turn; its reward is earned with the turn after it, or with the last.

    Args:
        gamma: Discount per turn, in [0, 1].
        baseline: ``group`` compares a rollout's mean return with the other rollouts of its task, ``turn`` the
            returns of one agent's turn with the same turn of the others; that is finer, and a turn that only one
            rollout reaches has nothing to be compared with.
    """

    def __init__(self, *, gamma: float = 1.0, baseline: Literal["group", "turn"] = "group") -> None:
        check_gamma(gamma, "gamma")
        if baseline not in ("group", "turn"):
            raise ConfigError(f"turn credit got baseline={baseline!r}; use 'group' or 'turn'")
        self._gamma = gamma
        self._baseline = baseline

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """One list per episode; raises :class:`ConfigError` for a trained episode without any reward."""
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
        group = group_of(episode)
        return group if self._baseline == "group" else f"{group}/{call.agent}/{call.turn}"


def discounted_returns(calls: Sequence[Transition], *, final: float, gamma: float) -> dict[str, float]:
    """The discounted return of every call that is not rejected, by span id; ``calls`` in order of time."""
    values: dict[str, float] = {}
    future, is_last = final, True
    for _, step in groupby(reversed(calls), key=lambda call: (bool(call.reject), call.agent, call.turn)):
        members = list(step)
        earned = sum(call.reward or 0.0 for call in members)
        if members[0].reject:
            future += earned
            continue
        later = future if is_last else gamma * future
        values.update((call.span_id, (call.reward or 0.0) + later) for call in members)
        future, is_last = earned + later, False
    return values


def check_gamma(gamma: float, what: str) -> None:
    """Raise :class:`ConfigError` for a discount outside [0, 1]."""
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"{what} is {gamma}; a discount is between 0 and 1")
