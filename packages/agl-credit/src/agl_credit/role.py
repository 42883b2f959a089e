"""Credit ``role``: rewards, baselines and discount per agent.

All values are returns, not advantages; an algorithm's estimator compares those with one ``baseline`` key, each rollout
counting once in its statistics. The keys therefore name tasks, roles or turns, never single calls.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from agl.episodes import ScoreOptions, score
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Reward, Transition
from agl_credit.episodes import final_of, group_of, live_calls
from agl_credit.turn import check_gamma, discounted_returns


class Role(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One role's part in :class:`RoleCredit`.

    Attributes:
        reward: Regular expression on the names of the episode's rewards; the role earns the sum of those that
            match as a whole. ``""`` for the episode's own reward.
        gamma: Discount per turn of this role; ``None`` for the credit's.
        baseline: What the role's calls are compared with: ``role`` the same role in the other rollouts of the task,
            ``turn`` the same turn of one agent, ``group`` all roles that say so as one.
    """

    reward: str = ""
    gamma: float | None = None
    baseline: Literal["role", "turn", "group"] = "role"


class RoleCredit:
    """Rewards, baselines and discount per role: agents that do different work are judged separately.

    Each role's calls are one sequence in order of time, discounted as in :class:`TurnCredit`, and end with the
    role's own reward. A role is compared with the same role in the other rollouts of the task, unless its
    ``baseline`` says otherwise.

    Args:
        roles: Role settings by a regular expression that matches an agent's whole name; the first that matches
            counts. An agent that none matches is a role of its own with the episode's reward.
        gamma: Discount per turn where a role sets none, in [0, 1].
        trust_agent: Whether rewards that came with an agent's own token count.

    Raises:
        ConfigError: For an unknown setting, a bad regular expression or a discount out of range.
    """

    def __init__(
        self,
        *,
        roles: Mapping[str, Role | Mapping[str, object]] | None = None,
        gamma: float = 1.0,
        trust_agent: bool = False,
    ) -> None:
        check_gamma(gamma, "gamma")
        self._gamma = gamma
        self._trust_agent = trust_agent
        self._roles = [(_pattern(name, "role"), _role(name, settings)) for name, settings in (roles or {}).items()]

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """One list per episode, in order of time; raises :class:`ConfigError` for a trained role without reward."""
        return [self._assign(episode) for episode in group]

    def _assign(self, episode: Episode) -> list[CallCredit]:
        by_role: dict[str, list[Transition]] = {}
        for call in episode.transitions:
            by_role.setdefault(self._name(call.agent), []).append(call)
        credits: dict[str, CallCredit] = {}
        for name, calls in by_role.items():
            if any(not call.reject for call in calls):
                credits.update(self._assign_role(episode, name, calls))
        return [credits[call.span_id] for call in live_calls(episode)]

    def _assign_role(self, episode: Episode, name: str, calls: Sequence[Transition]) -> dict[str, CallCredit]:
        role = self._settings(calls[0].agent)
        final = self._earned(episode, name, role, has_other=any(call.reward is not None for call in calls))
        gamma = self._gamma if role.gamma is None else role.gamma
        values = discounted_returns(calls, final=final, gamma=gamma)
        group = group_of(episode)
        keys = {"group": group, "role": f"{group}/{name}"}
        return {
            call.span_id: CallCredit(
                span_id=call.span_id,
                value=values[call.span_id],
                baseline=keys.get(role.baseline) or f"{group}/{call.agent}/{call.turn}",
            )
            for call in calls
            if not call.reject
        }

    def _earned(self, episode: Episode, name: str, role: Role, *, has_other: bool) -> float:
        if not role.reward:
            return final_of(episode, has_other=has_other)
        admitted = [reward for reward in episode.rewards if self._trust_agent or reward.source != "agent"]
        found = _matching(admitted, role.reward)
        if not found and not has_other:
            names = sorted({reward.name for reward in episode.rewards})
            raise ConfigError(
                f"role {name!r} earns rewards named {role.reward!r} and rollout {episode.rollout.rollout_id} has "
                f"none with a value; recorded: {names}. Emit that reward, or correct the name in the credit's roles"
            )
        return sum(found)

    def _name(self, agent: str) -> str:
        return next((pattern.pattern for pattern, _ in self._roles if pattern.fullmatch(agent)), agent)

    def _settings(self, agent: str) -> Role:
        return next((role for pattern, role in self._roles if pattern.fullmatch(agent)), Role())


def _matching(rewards: Iterable[Reward], pattern: str) -> list[float]:
    """The values of the episode's rewards whose names match, one per name by the usual precedence."""
    wanted = [reward for reward in rewards if re.fullmatch(pattern, reward.name)]
    names = dict.fromkeys(reward.name for reward in wanted)
    values = (score(wanted, options=ScoreOptions(key=name)).value for name in names)
    return [value for value in values if value is not None]


def _role(name: str, settings: Role | Mapping[str, object]) -> Role:
    if not isinstance(settings, Role):
        try:
            settings = msgspec.convert(dict(settings), Role)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"the settings of role {name!r} are wrong: {error}; use reward, gamma and baseline"
            ) from error
    _pattern(settings.reward, f"reward of role {name!r}")
    if settings.gamma is not None:
        check_gamma(settings.gamma, f"gamma of role {name!r}")
    return settings


def _pattern(text: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"the {what} {text!r} is not a regular expression: {error}; correct it") from error
