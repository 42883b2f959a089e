"""Credit ``role``: rewards, baselines and discount per agent.

All values are returns, not advantages. An algorithm's estimator compares the values that share a ``baseline`` key, and
each rollout counts once in its statistics. The keys therefore name tasks, roles or turns, never single calls.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from agl.episodes import ScoreOptions, score
from agl.errors import ConfigError
from agl.hints import check_table
from agl.schemas import CallCredit, Episode, Reward, Transition
from agl_rewards.credit.episodes import final_of, group_of, live_calls
from agl_rewards.credit.turn import Discount, discounted_returns


class Role(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one role in :class:`RoleCredit`.

    Attributes:
        reward: Regular expression on the names of the episode's rewards; the role earns the sum of the rewards whose
            whole name matches. ``""`` for the episode's own reward.
        gamma: Discount per turn of this role; ``None`` for the discount of the whole credit.
        baseline: The calls with which the role's calls are compared: ``role`` for the same role in the other rollouts
            of the task, ``turn`` for the same agent at the same turn, ``group`` for all roles with this setting.
    """

    reward: str = ""
    gamma: Discount | None = None
    baseline: Literal["role", "turn", "group"] = "role"


class RoleCredit:
    """Rewards, baselines and discount per role, so that agents with different work are judged separately.

    The calls of a role form a sequence in order of time. It is discounted as in :class:`TurnCredit` and ends with the
    role's own reward; turns of other roles in between are not counted. A role is compared with the same role in the
    other rollouts of the task, unless its ``baseline`` says otherwise.

    Args:
        roles: Role settings, by a regular expression that must match an agent's whole name; the first match counts. An
            agent that no expression matches is a separate role with the episode's reward.
        gamma: Discount per turn for roles that set none, in [0, 1].
        trust_agent: Whether rewards that came with an agent's own token count too.

    Raises:
        ConfigError: A setting is unknown, a regular expression is invalid, or a discount is out of range.
    """

    def __init__(
        self,
        *,
        roles: Mapping[str, Role | Mapping[str, object]] | None = None,
        gamma: Discount = 1.0,
        trust_agent: bool = False,
    ) -> None:
        self._gamma = gamma
        self._trust_agent = trust_agent
        self._roles = [(_pattern(name, "role"), _role(name, settings)) for name, settings in (roles or {}).items()]

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Return the credit of each call, in one list per episode and in order of time.

        Raises:
            ConfigError: A role that trains has no reward.
        """
        return [self._assign(episode) for episode in group]

    def _assign(self, episode: Episode) -> list[CallCredit]:
        # Rejected calls stay in a role's sequence, for their rewards; a role with nothing else needs no reward.
        by_role: dict[str, list[Transition]] = {}
        for call in episode.transitions:
            by_role.setdefault(self._name(call.agent), []).append(call)
        credits: dict[str, CallCredit] = {}
        for name, calls in by_role.items():
            if any(not call.reject for call in calls):
                credits.update(self._assign_role(episode, name, calls))
        return [credits[call.span_id] for call in live_calls(episode)]

    def _assign_role(self, episode: Episode, name: str, calls: Sequence[Transition]) -> dict[str, CallCredit]:
        """Return the credit of one role's training calls: G_t over the role's own turns, ending with its own reward."""
        role = self._settings(calls[0].agent)
        # R of this role; G_T = r_T + R at its last turn, whichever role speaks last in the episode.
        final = self._earned(episode, name, role, has_other=any(call.reward is not None for call in calls))
        gamma = self._gamma if role.gamma is None else role.gamma
        values = discounted_returns(calls, final=final, gamma=gamma)  # G_t = r_t + gamma G_{t+1}, by span id
        group = group_of(episode)
        # All keys begin with the task: nothing is ever compared across tasks, whose difficulty differs.
        keys = {"group": group, "role": f"{group}/{name}"}
        return {
            call.span_id: CallCredit(
                span_id=call.span_id,
                value=values[call.span_id],
                baseline=keys.get(role.baseline) or f"{group}/{call.agent}/{call.turn}",
                role=name,
            )
            for call in calls
            if not call.reject
        }

    def _earned(self, episode: Episode, name: str, role: Role, *, has_other: bool) -> float:
        """Return the reward that a role earns at its last turn; 0.0 if only the role's turns have rewards."""
        if not role.reward:
            return final_of(episode, has_other=has_other)
        # An agent holds a token of its own and could report any reward for itself.
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
        """Return the role of an agent: the first role pattern that matches the agent's name, or else the name."""
        return next((pattern.pattern for pattern, _ in self._roles if pattern.fullmatch(agent)), agent)

    def _settings(self, agent: str) -> Role:
        return next((role for pattern, role in self._roles if pattern.fullmatch(agent)), Role())


def _matching(rewards: Iterable[Reward], pattern: str) -> list[float]:
    """Return the values of rewards whose names match ``pattern``; `agl.episodes.score` chooses one value per name."""
    wanted = [reward for reward in rewards if re.fullmatch(pattern, reward.name)]
    names = dict.fromkeys(reward.name for reward in wanted)
    values = (score(wanted, options=ScoreOptions(key=name)).value for name in names)
    return [value for value in values if value is not None]


def _role(name: str, settings: Role | Mapping[str, object]) -> Role:
    """Return the settings as a checked ``Role``; raises :class:`ConfigError`, which names the role."""
    if not isinstance(settings, Role):
        if unknown := sorted(settings.keys() - set(Role.__struct_fields__)):
            raise ConfigError(f"role {name!r} has no setting {unknown[0]!r}; use reward, gamma and baseline")
        settings = check_table(settings, Role, f"role {name!r}: ")
    _pattern(settings.reward, f"reward of role {name!r}")
    return settings


def _pattern(text: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"the {what} {text!r} is not a regular expression: {error}; correct it") from error
