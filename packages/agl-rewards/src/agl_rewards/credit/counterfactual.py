"""Credits by replays without an agent: leave-one-out and Shapley.

A rollout is a cooperative game. Its players are the agents whose calls train; agents that do not train belong to the
world that the players act in. The worth v(N) of the run as it was is its reward. The worth v(S) of a coalition S is
the mean reward of replays in which the part of the players outside of S is replaced: the other agents give their
recorded answers as long as they are asked the same; where they are asked something else, the model answers anew.

A coalition is given by the players who are *replaced*: v(N) is the worth of the empty set, and v(nobody) the worth of
the set of all players. Running replays is left to `agl_run`; this module asks for them within a budget.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, Literal

import msgspec

from agl.contracts import ReplayFn, ReplayPlan
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Reward
from agl_rewards.credit.episodes import by_group, group_of, live_calls, players_of, return_of

ROUNDING = 1e-6
"""Shares of one agent closer than this, relative to the largest of them (at least 1), are equal."""

Baseline = Literal["centred", "counterfactual", "group"]
Count = Annotated[int, msgspec.Meta(ge=1)]

Replaced = frozenset[str]
Worth = Callable[[Replaced], float]
Order = tuple[str, ...]


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


class _ReplayCredit:
    """A credit by replays, whose subclass says which worths are needed and how shares follow from them."""

    NAME = ""
    """The credit's name, under which shares are attached to the episodes."""

    def __init__(
        self,
        *,
        replace: Literal["silent", "sibling"] = "silent",
        text: str = "",
        samples: Count = 1,
        every: Count = 1,
        max_replays: Count = 1024,
        failed: float = 0.0,
        baseline: Baseline = "centred",
    ) -> None:
        self._replace, self._text, self._samples, self._every = replace, text, samples, every
        self._max_replays, self._failed, self._baseline = max_replays, failed, baseline

    def _coalitions(self, players: Sequence[str], name: str) -> list[Replaced]:
        """Return the replaced players of each coalition whose worth is needed, but not the run as it was.

        The rollout's id ``name`` may seed a random choice, which is the same in :meth:`_shares_of`.
        """
        raise NotImplementedError

    def _shares_of(self, players: Sequence[str], name: str, worth: Worth) -> dict[str, float]:
        """Return every player's share; ``worth`` knows the coalitions above and the run as it was."""
        raise NotImplementedError

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> list[Episode]:
        """Replay every episode with each needed coalition, and attach the shares as a reward of the credit's name.

        Raises :class:`ConfigError` when no call names its agent, or when not even one group fits into the budget.
        """
        if (step - 1) % self._every:  # steps count from 1; the first is always replayed
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
        """Give each call its agent's share, or without shares the episode's return, compared within the role.

        Returns one list per episode, in order of time. Raises :class:`ConfigError` for a trained episode without
        reward.
        """
        shares = [self._read(episode) for episode in group]
        if self._baseline == "centred":
            shares = _centred(shares)
        return [self._assign(episode, own) for episode, own in zip(group, shares, strict=True)]

    def _assign(self, episode: Episode, shares: Mapping[str, float] | None) -> list[CallCredit]:
        calls = live_calls(episode)
        if not calls:
            return []
        # A share is a difference of worths already; `baseline = "group"` has the estimator compare it once more.
        is_final = shares is not None and self._baseline != "group"
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
                if players and (siblings or self._replace == "silent"):
                    stand_in = first.setdefault(players, episode.rollout.rollout_id)
                    games.append(RolloutGame(episode=episode, players=players, siblings=siblings, stand_in=stand_in))
        self._check(games)
        return games

    def _check(self, games: Sequence[RolloutGame]) -> None:
        if not games and self._replace == "sibling":
            raise ConfigError(
                f"{self.NAME} replaces an agent's answers by those of another rollout of the task, and no task has "
                'two rollouts; let the algorithm run each task at least twice, or use replace = "silent"'
            )
        if games and all(game.players == ("",) for game in games):
            raise ConfigError(
                f"{self.NAME} needs to know which agent makes each call, and no call of this step names one. Install "
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
        left, kept = self._max_replays, list[RolloutGame]()
        for name in names[start:] + names[:start]:
            if needs[name] <= left:
                left -= needs[name]
                kept += groups[name]
        if games and not kept:
            raise ConfigError(
                f"{self.NAME} may take {self._max_replays} replays per step, and the smallest group needs "
                f"{min(needs.values())}; raise max_replays, or let the algorithm run fewer rollouts per task"
            )
        return kept

    def _plans(self, game: RolloutGame) -> list[ReplayPlan]:
        coalitions = self._coalitions(game.players, game.name)
        return [plan for replaced in coalitions for plan in self._replays(game, replaced)]

    def _replays(self, game: RolloutGame, replaced: Replaced) -> list[ReplayPlan]:
        """Return the plans of the replays whose mean reward is a coalition's worth."""
        names = tuple(sorted(replaced))
        if self._replace == "sibling":
            return [
                ReplayPlan(
                    rollout_id=game.name,
                    replaced=names,
                    how="sibling",
                    text=self._text,
                    # One sibling after another, and only then a second sample of each.
                    sibling=game.siblings[sample % len(game.siblings)],
                    sample=sample // len(game.siblings),
                )
                for sample in range(self._samples)
            ]
        # With every player silent nothing of the rollout is left but its task: one replay serves the whole group.
        source = game.stand_in if names == game.players else game.name
        return [
            ReplayPlan(rollout_id=source, replaced=names, text=self._text, sample=sample)
            for sample in range(self._samples)
        ]

    def _shares(self, game: RolloutGame, rewards: Mapping[ReplayPlan, float]) -> dict[str, float]:
        def worth(replaced: Replaced) -> float:
            if not replaced:
                return return_of(game.episode)  # v(N) = R, as recorded
            # v(S) = mean of R over the replays of S
            return sum(rewards[plan] for plan in self._replays(game, replaced)) / self._samples

        return self._shares_of(game.players, game.name, worth)

    def _worth(self, replayed: Episode) -> float:
        """Return the reward of a replay, or ``failed`` for one that failed or got none."""
        is_scored = replayed.rollout.status == "succeeded" and replayed.reward is not None
        return replayed.reward if is_scored and replayed.reward is not None else self._failed

    def _attached(self, episode: Episode, shares: Mapping[str, float] | None) -> Episode:
        if shares is None:
            return episode
        reward = Reward(value=None, name=self.NAME, dimensions=dict(shares), source="hook")
        return msgspec.structs.replace(episode, rewards=(*episode.rewards, reward))

    def _read(self, episode: Episode) -> Mapping[str, float] | None:
        """Return the shares that :meth:`prepare` attached, ``None`` if it left the episode out."""
        # Only the hook's own reward counts: an agent could report one of the same name.
        for reward in reversed(episode.rewards):
            if reward.name == self.NAME and reward.source == "hook" and reward.value is None:
                return {agent: share for agent, share in reward.dimensions.items() if share is not None}
        return None


class LeaveOneOutCredit(_ReplayCredit):
    """Gives an agent the reward of the run less the reward of the run without it: ``A_i = R - R(without i)``.

    R(without i) is the mean reward of ``samples`` replays in which agent i's answers are replaced. This is the
    difference reward of Wolpert and Tumer 2001 ("Optimal Payoff Functions for Members of Collectives"), and with
    ``replace = "sibling"`` a one-sample form of the counterfactual baseline of COMA (Foerster et al. 2018, arXiv
    1705.08926, equation 4). The baseline does not depend on agent i's own answers, so subtracting it leaves the policy
    gradient unbiased and removes the noise that comes from the other agents.

    Costs one replay per rollout, agent and sample: at most ``rollouts * agents * samples`` per step. Rollouts that are
    not replayed (steps that ``every`` skips, groups beyond ``max_replays``) get their return, compared with the same
    role in the other rollouts of the task.

    Args:
        replace: Replacement for a missing agent: ``silent`` says ``text`` at every turn and calls no tool,
            ``sibling`` repeats the same agent's answer at that turn in another rollout of the task.
        text: The answer of a silent agent.
        samples: Replays per rollout and agent. More than one helps where the other agents answer anew.
        every: Replay in every n-th step only, beginning with the first.
        max_replays: Replays per step at most; whole groups are left out beyond it, in turns.
        failed: The worth of a replay that fails or gets no reward.
        baseline: ``centred``: the advantage is the difference less the mean of the same agent's in the task's other
            rollouts. ``counterfactual``: it is the difference as it is; where silence earns nothing, failures get 0
            and only successes train. ``group``: the difference is a return, which the algorithm's estimator
            compares with the same role in the other rollouts of the task.
    """

    NAME = "leave-one-out"

    def _coalitions(self, players: Sequence[str], name: str) -> list[Replaced]:
        # N without i, for each i: n coalitions, and nothing to draw, so the name is not needed.
        return [frozenset({player}) for player in players]

    def _shares_of(self, players: Sequence[str], name: str, worth: Worth) -> dict[str, float]:
        # A_i = v(N) - v(N without i)
        return leave_one_out(players, worth)


class ShapleyCredit(_ReplayCredit):
    """Gives an agent the worth that it adds to the agents before it, averaged over the agents' orders.

        phi_i = mean over orders of  v(those before i, and i) - v(those before i)

    (Shapley 1953, "A Value for n-Person Games"). The shares add up to v(all) - v(nobody) exactly, whatever is sampled.
    All orders are taken when there are at most ``orders`` of them, else that many random ones (Castro et al. 2009,
    "Polynomial calculation of the Shapley value based on sampling"), each followed by its reverse. Unlike
    leave-one-out it also credits an agent whose good work another one spoilt: alone, it would have earned.

    A coalition is replayed once, however many orders pass through it. The one in which all agents are silent is
    replayed once per task, because nothing of a rollout is left in it. For n agents that makes at most
    ``samples * min(2^n - 1, orders * n)`` replays per rollout: 7 for three agents with all 6 orders.

    Args:
        orders: Orders of the agents per rollout; all of them when there are no more.
        seed: Seed of the sampled orders, together with the rollout's id.
        replace: As for :class:`LeaveOneOutCredit`, like the other settings.
        text: The answer of a silent agent.
        samples: Replays per coalition. More than one helps where the other agents answer anew.
        every: Replay in every n-th step only, beginning with the first.
        max_replays: Replays per step at most; whole groups are left out beyond it, in turns.
        failed: The worth of a replay that fails or gets no reward.
        baseline: How the share becomes an advantage.
    """

    NAME = "shapley"

    def __init__(
        self,
        *,
        orders: Count = 8,  # all 6 of three agents; four agents have 24
        seed: int = 0,
        replace: Literal["silent", "sibling"] = "silent",
        text: str = "",
        samples: Count = 1,
        every: Count = 1,
        max_replays: Count = 1024,
        failed: float = 0.0,
        baseline: Baseline = "centred",
    ) -> None:
        self._limit, self._seed = orders, seed
        super().__init__(
            replace=replace,
            text=text,
            samples=samples,
            every=every,
            max_replays=max_replays,
            failed=failed,
            baseline=baseline,
        )

    def _coalitions(self, players: Sequence[str], name: str) -> list[Replaced]:
        # All prefixes of the orders, each once: with all n! orders these are all 2^n - 1 proper coalitions.
        return coalitions_of(self._orders(players, name))

    def _shares_of(self, players: Sequence[str], name: str, worth: Worth) -> dict[str, float]:
        # phi_i, or its unbiased estimate when the orders are a sample
        return shapley(players, self._orders(players, name), worth)

    def _orders(self, players: Sequence[str], name: str) -> list[Order]:
        # Seeded by the rollout's id: both methods, and a step that is repeated after a crash, draw the same orders,
        # while the rollouts of a task draw different ones, whose errors average out.
        return orders_of(players, limit=self._limit, draw=random.Random(f"{self._seed}/{name}"))


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


def leave_one_out(players: Sequence[str], worth: Worth) -> dict[str, float]:
    """Return v(N) - v(N without i) for every player i; n players cost n + 1 worths.

    The shares need not add up to anything: two players who can stand in for each other both get 0.
    """
    whole = worth(frozenset())  # v(N)
    return {player: whole - worth(frozenset({player})) for player in players}


def shapley(players: Sequence[str], orders: Sequence[Order], worth: Worth) -> dict[str, float]:
    """Return for every player the mean over ``orders`` of the worth that it adds to the players before it.

    Every order adds up to v(N) - v(nobody), so the shares do too, however few orders there are; over all orders of
    the players they are the Shapley values.
    """
    added: dict[str, list[float]] = {player: [] for player in players}
    for order in orders:
        # Players come in one by one: first all are replaced, then all but the first, until the run is as it was.
        before = worth(frozenset(order))  # v(nobody)
        for position, player in enumerate(order):
            after = worth(frozenset(order[position + 1 :]))  # v(the players up to this one)
            added[player].append(after - before)
            before = after  # the differences telescope: their sum over the order is v(N) - v(nobody)
    # phi_i = (1 / |orders|) sum over orders of [v(before i, and i) - v(before i)]. Every order has every player once,
    # so all means are over the same number and the shares add up to v(N) - v(nobody) as each order does.
    return {player: math.fsum(found) / len(orders) for player, found in added.items()}


def orders_of(players: Sequence[str], *, limit: int, draw: random.Random) -> list[Order]:
    """Return all orders of the players when there are at most ``limit``, else as many random ones in pairs.

    Each random order is followed by its reverse. The two are antithetic: a player that comes early in one comes late
    in the other, which takes variance out of the mean (Mitchell et al. 2022, "Sampling Permutations for Shapley Value
    Estimation"). With an odd ``limit`` the last order has no partner.
    """
    # n! orders: 6 for three players, 24 for four, 120 for five.
    if math.factorial(len(players)) <= limit:
        return list(permutations(players))
    found: list[Order] = []
    while len(found) < limit:
        order = tuple(draw.sample(list(players), len(players)))  # uniform; an order may come twice
        found += [order, order[::-1]]
    return found[:limit]


def coalitions_of(orders: Sequence[Order]) -> list[Replaced]:
    """Return the replaced players of each coalition whose worth :func:`shapley` asks for, but not the run as it was.

    Each comes once, however many orders pass through it: n players have at most 2^n - 1.
    """
    # The players not yet in are a suffix of the order. The empty suffix is the recorded run, whose worth is known.
    found = dict.fromkeys(frozenset(order[start:]) for order in orders for start in range(len(order)))
    return list(found)
