"""Asks for replays within a budget and turns their rewards into shares; leave-one-out and Shapley credit share it.

A rollout is a cooperative game. Its players are the agents whose calls train; agents that do not train belong to the
world that the players act in. The worth v(N) of the run as it was is its reward. The worth v(S) of a coalition S is
the mean reward of replays in which the part of the players outside of S is replaced.
A ``SharingRule`` says which worths are needed and how shares follow from them. Running replays is left to `agl_run`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import msgspec

from agl.contracts import ReplayFn, ReplayPlan
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Reward
from agl_rewards.credit.episodes import by_group, group_of, live_calls, players_of, return_of
from agl_rewards.credit.games import Replaced, Worth

ROUNDING = 1e-6
"""Shares of one agent closer than this, relative to the largest of them (at least 1), are equal."""

Baseline = Literal["centred", "counterfactual", "group"]


class SharingRule(Protocol):
    """Derives shares from worths. Deterministic: both methods must take the same coalitions for the same arguments.

    ``name`` is the rollout's id and may seed a random choice.
    """

    def coalitions(self, players: Sequence[str], name: str) -> list[Replaced]:
        """Return the replaced players of each coalition whose worth is needed, but not the run as it was."""
        ...

    def shares(self, players: Sequence[str], name: str, worth: Worth) -> dict[str, float]:
        """Return every player's share; ``worth`` knows the coalitions above and the run as it was."""
        ...


class CounterfactualSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of both credits; :class:`agl_rewards.credit.leave_one_out.LeaveOneOutCredit` explains them."""

    replace: Literal["silent", "sibling"] = "silent"
    text: str = ""
    samples: int = 1
    every: int = 1
    max_replays: int = 1024
    failed: float = 0.0
    baseline: Baseline = "centred"

    def check(self, name: str) -> None:
        """Raise :class:`ConfigError` for an unknown or impossible setting."""
        if self.replace not in ("silent", "sibling") or self.baseline not in get_args(Baseline):
            raise ConfigError(
                f"{name} got replace = {self.replace!r} and baseline = {self.baseline!r}; replace is 'silent' or "
                "'sibling', baseline is 'centred', 'counterfactual' or 'group'"
            )
        low = {key: value for key in ("samples", "every", "max_replays") if (value := getattr(self, key)) < 1}
        if low:
            raise ConfigError(f"{name} got {low}; each must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RolloutGame:
    """One episode as a game.

    Attributes:
        siblings: Ids of the other rollouts of the group, in a circle that begins after this one.
        stand_in: Id of the rollout that is replayed when all players are silent: the first one of the group with the
            same players.
    """

    episode: Episode
    players: tuple[str, ...]
    siblings: tuple[str, ...]
    stand_in: str

    @property
    def name(self) -> str:
        """The rollout's id."""
        return self.episode.rollout.rollout_id


class ReplayCredit:
    """Prepares and assigns a counterfactual credit.

    Args:
        name: The credit's name, under which shares are attached to the episodes.
        rule: Derives the shares.
        settings: The credit's parameters.
    """

    def __init__(self, name: str, rule: SharingRule, settings: CounterfactualSettings) -> None:
        settings.check(name)
        self._name, self._rule, self._settings = name, rule, settings

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> list[Episode]:
        """Return the episodes in order, with their players' shares attached to those within the budget."""
        if (step - 1) % self._settings.every:  # steps count from 1; the first is always replayed
            return list(episodes)
        games = self._affordable(self._games(episodes), step)
        if not games:
            return list(episodes)
        # Equal plans run once: rollouts of a task share the one in which everybody is silent.
        plans = list(dict.fromkeys(plan for game in games for plan in self._plans(game)))
        rewards = dict(zip(plans, [self._worth(episode) for episode in await replay(plans)], strict=True))
        shares = {game.name: self._shares(game, rewards) for game in games}
        return [self._attached(episode, shares.get(episode.rollout.rollout_id)) for episode in episodes]

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Give each call its agent's share, or without shares the episode's return, compared within the role."""
        shares = [self._read(episode) for episode in group]
        if self._settings.baseline == "centred":
            shares = _centred(shares)
        return [self._assign(episode, own) for episode, own in zip(group, shares, strict=True)]

    def _assign(self, episode: Episode, shares: Mapping[str, float] | None) -> list[CallCredit]:
        calls = live_calls(episode)
        if not calls:
            return []
        # A share is a difference of worths already; `baseline = "group"` has the estimator compare it once more.
        is_final = shares is not None and self._settings.baseline != "group"
        value = return_of(episode)
        return [
            CallCredit(
                span_id=call.span_id,
                value=value if shares is None else shares[call.agent],
                baseline=f"{group_of(episode)}/{call.agent}",
                is_advantage=is_final,
            )
            for call in calls
        ]

    def _games(self, episodes: Sequence[Episode]) -> list[RolloutGame]:
        """Return a game for every episode that has players, and siblings where those are needed."""
        games: list[RolloutGame] = []
        for group in by_group(episodes).values():
            ids = sorted(episode.rollout.rollout_id for episode in group)
            first: dict[tuple[str, ...], str] = {}
            for episode in sorted(group, key=lambda each: each.rollout.rollout_id):
                players, own = players_of(episode), ids.index(episode.rollout.rollout_id)
                # In a circle, so that each rollout begins with another sibling and none answers for the whole group.
                siblings = tuple(ids[own + 1 :] + ids[:own])
                if players and (siblings or self._settings.replace == "silent"):
                    stand_in = first.setdefault(players, episode.rollout.rollout_id)
                    games.append(RolloutGame(episode=episode, players=players, siblings=siblings, stand_in=stand_in))
        self._check(games)
        return games

    def _check(self, games: Sequence[RolloutGame]) -> None:
        if not games and self._settings.replace == "sibling":
            raise ConfigError(
                f"{self._name} replaces an agent's answers by those of another rollout of the task, and no task has "
                'two rollouts; let the algorithm run each task at least twice, or use replace = "silent"'
            )
        if games and all(game.players == ("",) for game in games):
            raise ConfigError(
                f"{self._name} needs to know which agent makes each call, and no call of this step names one. Install "
                "the tracer of the agent's framework, or wrap each agent's part: with agl.operation(\"writer\"): ..."
            )

    def _affordable(self, games: Sequence[RolloutGame], step: int) -> list[RolloutGame]:
        """Return the games of as many whole groups as the budget has replays for.

        Groups stay whole because their rollouts are compared. Each step begins with another group, so that over the
        steps none is left out for good. Raises :class:`ConfigError` when not even one group fits.
        """
        groups: dict[str, list[RolloutGame]] = {}
        for game in games:
            groups.setdefault(group_of(game.episode), []).append(game)
        names = list(groups)
        start = (step - 1) % len(names) if names else 0
        needs = {name: len({plan for game in own for plan in self._plans(game)}) for name, own in groups.items()}
        # Plans name a rollout of their own group, so no two groups share one and the needs add up.
        left, kept = self._settings.max_replays, list[RolloutGame]()
        for name in names[start:] + names[:start]:
            if needs[name] <= left:
                left -= needs[name]
                kept += groups[name]
        if games and not kept:
            raise ConfigError(
                f"{self._name} may take {self._settings.max_replays} replays per step, and the smallest group needs "
                f"{min(needs.values())}; raise max_replays, or let the algorithm run fewer rollouts per task"
            )
        return kept

    def _plans(self, game: RolloutGame) -> list[ReplayPlan]:
        coalitions = self._rule.coalitions(game.players, game.name)
        return [plan for replaced in coalitions for plan in self._samples(game, replaced)]

    def _samples(self, game: RolloutGame, replaced: Replaced) -> list[ReplayPlan]:
        """Return the plans of the replays whose mean reward is a coalition's worth."""
        settings, names = self._settings, tuple(sorted(replaced))
        if settings.replace == "sibling":
            return [
                ReplayPlan(
                    rollout_id=game.name,
                    replaced=names,
                    how="sibling",
                    text=settings.text,
                    # One sibling after another, and only then a second sample of each.
                    sibling=game.siblings[sample % len(game.siblings)],
                    sample=sample // len(game.siblings),
                )
                for sample in range(settings.samples)
            ]
        # With every player silent nothing of the rollout is left but its task: one replay serves the whole group.
        source = game.stand_in if names == game.players else game.name
        return [
            ReplayPlan(rollout_id=source, replaced=names, text=settings.text, sample=sample)
            for sample in range(settings.samples)
        ]

    def _shares(self, game: RolloutGame, rewards: Mapping[ReplayPlan, float]) -> dict[str, float]:
        def worth(replaced: Replaced) -> float:
            if not replaced:
                return return_of(game.episode)  # v(N) = R, as recorded
            # v(S) = mean of R over the replays of S
            return sum(rewards[plan] for plan in self._samples(game, replaced)) / self._settings.samples

        return self._rule.shares(game.players, game.name, worth)

    def _worth(self, replayed: Episode) -> float:
        """Return the reward of a replay, or ``failed`` for one that failed or got none."""
        is_scored = replayed.rollout.status == "succeeded" and replayed.reward is not None
        return replayed.reward if is_scored and replayed.reward is not None else self._settings.failed

    def _attached(self, episode: Episode, shares: Mapping[str, float] | None) -> Episode:
        if shares is None:
            return episode
        reward = Reward(value=None, name=self._name, dimensions=dict(shares), source="hook")
        return msgspec.structs.replace(episode, rewards=(*episode.rewards, reward))

    def _read(self, episode: Episode) -> Mapping[str, float] | None:
        """Return the shares that :meth:`prepare` attached, ``None`` if it left the episode out."""
        # Only the hook's own reward counts: an agent could report one of the same name.
        for reward in reversed(episode.rewards):
            if reward.name == self._name and reward.source == "hook" and reward.value is None:
                return {agent: share for agent, share in reward.dimensions.items() if share is not None}
        return None


def _centred(shares: Sequence[Mapping[str, float] | None]) -> list[Mapping[str, float] | None]:
    """Return the shares of a group's episodes less the mean of the same agent's in the others.

    The mean holds nothing of the episode itself, so subtracting it leaves the expected gradient unchanged. An agent
    that the others do not have keeps its share. Shares that differ only by rounding are equal, and leave nothing.
    """
    given: dict[str, list[float]] = {}
    for own in shares:
        for agent, share in (own or {}).items():
            given.setdefault(agent, []).append(share)

    def less_others(agent: str, share: float) -> float:
        every = given[agent]
        if len(every) == 1:
            return share
        are_equal = max(every) - min(every) <= ROUNDING * max(1.0, *map(abs, every))
        return 0.0 if are_equal else share - (sum(every) - share) / (len(every) - 1)

    return [
        None if own is None else {agent: less_others(agent, share) for agent, share in own.items()} for own in shares
    ]
