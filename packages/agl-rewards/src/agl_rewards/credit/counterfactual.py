"""Credits by replays in which agents are replaced: leave-one-out and Shapley.

A rollout is treated as a cooperative game. Its players are the agents whose calls train; all other agents belong to the
environment. The worth v(N) of the recorded run is its reward. The worth v(S) of a coalition S is the mean reward of
replays in which the players outside of S are replaced. The other agents give their recorded answers as long as their
requests stay the same; for a different request, the model gives a new answer.

In this module a coalition is given by the players who are *replaced*: the empty set has the worth v(N), and the set of
all players the worth v(nobody). `agl_run` runs the replays; this module requests them within a budget.
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
"""Two shares of an agent count as equal if they differ by less than this times the largest share (at least 1)."""

Baseline = Literal["centred", "counterfactual", "group"]
Count = Annotated[int, msgspec.Meta(ge=1)]

Replaced = frozenset[str]
Worth = Callable[[Replaced], float]
Order = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutGame:
    """One episode as a cooperative game between the agents that train.

    Attributes:
        episode: The episode.
        players: Names of the agents whose calls train, sorted.
        siblings: Ids of the other rollouts of the group, in circular order after this one.
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
    """Base of the credits that replay coalitions; a subclass chooses the coalitions and how worths become shares."""

    NAME = ""
    """The credit's name in experiments, and the name of the reward that stores an episode's shares."""

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
        """Return the coalitions to replay, each as the set of its replaced players; the recorded run is not among them.

        The rollout id ``name`` may seed a random choice; :meth:`_shares_of` must make the same choice.
        """
        raise NotImplementedError

    def _shares_of(self, players: Sequence[str], name: str, worth: Worth) -> dict[str, float]:
        """Return every player's share.

        ``worth`` gives the worth of the empty set and of each set from :meth:`_coalitions`.
        """
        raise NotImplementedError

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> list[Episode]:
        """Replay every episode once for each needed coalition, and attach the shares as a reward named like the credit.

        Raises:
            ConfigError: No call names its agent; ``replace`` is ``sibling`` and no task has two rollouts; or
                ``max_replays`` is too small for even one group.
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
        """Return the credit of each call: its agent's share or, in an episode without shares, the episode's return.

        The baseline key compares a call with calls of the same agent. Returns one list per episode, in order of time.

        Raises:
            ConfigError: An episode with calls to train on has no reward.
        """
        shares = [self._read(episode) for episode in group]
        if self._baseline == "centred":
            shares = _centred(shares)
        return [self._assign(episode, own) for episode, own in zip(group, shares, strict=True)]

    def _assign(self, episode: Episode, shares: Mapping[str, float] | None) -> list[CallCredit]:
        calls = live_calls(episode)
        if not calls:
            return []
        # A share is already a difference of worths; with `baseline = "group"` the estimator compares it once more.
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
        """Return a game for every episode with players; with ``replace = "sibling"``, also with a sibling."""
        games: list[RolloutGame] = []
        for group in by_group(episodes).values():
            ids = sorted(episode.rollout.rollout_id for episode in group)
            first: dict[tuple[str, ...], str] = {}
            for episode in sorted(group, key=lambda each: each.rollout.rollout_id):
                players, own = players_of(episode), ids.index(episode.rollout.rollout_id)
                # In circular order, so that each rollout begins with a different sibling and no rollout serves the
                # whole group.
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
        """Return the games of as many whole groups as the budget allows.

        Groups are not split, because their rollouts are compared. Each step begins with another group, so that no group
        is left out in every step. Raises :class:`ConfigError` if not even one group fits.
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
        """Return the replays to run for a coalition; the mean of their rewards is the coalition's worth."""
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
        """Return the reward of a replay, or ``failed`` if the replay failed or has no reward."""
        is_scored = replayed.rollout.status == "succeeded" and replayed.reward is not None
        return replayed.reward if is_scored and replayed.reward is not None else self._failed

    def _attached(self, episode: Episode, shares: Mapping[str, float] | None) -> Episode:
        if shares is None:
            return episode
        reward = Reward(value=None, name=self.NAME, dimensions=dict(shares), source="hook")
        return msgspec.structs.replace(episode, rewards=(*episode.rewards, reward))

    def _read(self, episode: Episode) -> Mapping[str, float] | None:
        """Return the shares that :meth:`prepare` attached; ``None`` if the episode was not replayed."""
        # Only the hook's own reward counts: an agent could report one of the same name.
        for reward in reversed(episode.rewards):
            if reward.name == self.NAME and reward.source == "hook" and reward.value is None:
                return {agent: share for agent, share in reward.dimensions.items() if share is not None}
        return None


class LeaveOneOutCredit(_ReplayCredit):
    """Gives an agent the reward of the run minus the reward of the run without the agent: ``A_i = R - R(without i)``.

    R(without i) is the mean reward of ``samples`` replays in which agent i's answers are replaced. This is the
    difference reward of Wolpert and Tumer 2001 ("Optimal Payoff Functions for Members of Collectives"), and with
    ``replace = "sibling"`` a one-sample form of the counterfactual baseline of COMA (Foerster et al. 2018, arXiv
    1705.08926, equation 4). R(without i) does not depend on agent i's own answers, so subtracting it leaves the policy
    gradient unbiased and removes the noise that comes from the other agents.

    The cost is at most ``rollouts * agents * samples`` replays per step. Rollouts that are not replayed (in steps that
    ``every`` skips, or in groups beyond ``max_replays``) get their return, compared with the same role in the other
    rollouts of the task.

    Args:
        replace: What replaces an agent's answers: with ``silent`` the agent says ``text`` at every turn and calls no
            tool, with ``sibling`` it gives the same agent's answer at that turn in another rollout of the task.
        text: The answer of a silent agent.
        samples: Replays per rollout and agent. More than one helps if the other agents give new answers.
        every: Replay only in every n-th step, beginning with the first.
        max_replays: The most replays per step; groups that exceed it are left out as a whole, in turns.
        failed: The worth of a replay that fails or gets no reward.
        baseline: How the difference becomes an advantage. ``centred`` subtracts the mean difference of the same agent
            in the task's other rollouts. ``counterfactual`` uses the difference unchanged; if silence earns nothing,
            failures then get 0 and only successes train. ``group`` treats the difference as a return, which the
            algorithm's estimator compares with the same role in the other rollouts of the task.
    """

    NAME = "leave-one-out"

    def _coalitions(self, players: Sequence[str], name: str) -> list[Replaced]:
        # N without i, for each i: n coalitions, and nothing to draw, so the name is not needed.
        return [frozenset({player}) for player in players]

    def _shares_of(self, players: Sequence[str], name: str, worth: Worth) -> dict[str, float]:
        # A_i = v(N) - v(N without i)
        return leave_one_out(players, worth)


class ShapleyCredit(_ReplayCredit):
    """Gives an agent the worth that it adds to the agents before it, averaged over orders of the agents.

        phi_i = mean over orders of  v(those before i, and i) - v(those before i)

    (Shapley 1953, "A Value for n-Person Games"). The shares always add up to exactly v(all) - v(nobody), even over a
    sample of orders. All orders are used if there are at most ``orders``; otherwise that many random ones are drawn
    (Castro et al. 2009, "Polynomial calculation of the Shapley value based on sampling"), in pairs of an order and its
    reverse. Unlike leave-one-out, this also credits an agent whose good work was spoilt by another one: without that
    one, it would have earned a reward.

    A coalition is replayed only once, however many orders contain it. The coalition in which all agents are silent is
    replayed once per task, because nothing of a rollout is left in it. For n agents this gives at most
    ``samples * min(2^n - 1, orders * n)`` replays per rollout: 7 for three agents with all 6 orders.

    Args:
        orders: The most orders of the agents that are used per rollout.
        seed: Seed of the sampled orders, together with the rollout's id.
        replace: What replaces an agent's answers: ``silent`` or ``sibling``; see :class:`LeaveOneOutCredit`.
        text: The answer of a silent agent.
        samples: Replays per coalition. More than one helps if the other agents give new answers.
        every: Replay only in every n-th step, beginning with the first.
        max_replays: The most replays per step; groups that exceed it are left out as a whole, in turns.
        failed: The worth of a replay that fails or gets no reward.
        baseline: How a share becomes an advantage; see :class:`LeaveOneOutCredit`.
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
    """Subtract from each share in a group the mean share of the same agent in the other episodes.

    The mean does not depend on the episode itself, so subtracting it leaves the expected gradient unchanged. If no
    other episode has the agent, its share is unchanged. Shares that differ only by rounding are equal and become 0.
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
    """Return every player's leave-one-out share v(N) - v(N without i), where v is the worth of a coalition.

    For n players this needs n + 1 worths. The shares have no fixed sum: two players who can each replace the other both
    get 0.
    """
    whole = worth(frozenset())  # v(N)
    return {player: whole - worth(frozenset({player})) for player in players}


def shapley(players: Sequence[str], orders: Sequence[Order], worth: Worth) -> dict[str, float]:
    """Return, for every player, the mean over ``orders`` of the worth that it adds to the players before it.

    Each order's differences add up to v(N) - v(nobody), and so do the shares, however few orders there are. Over all
    orders the shares are the Shapley values.
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
    """Return all orders of the players if there are at most ``limit``, else ``limit`` random ones in pairs.

    A pair is a random order and its reverse. The two are antithetic: a player that comes early in one comes late in the
    other, which reduces the variance of the mean (Mitchell et al. 2022, "Sampling Permutations for Shapley Value
    Estimation"). With an odd ``limit`` the last order has no reverse.
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
    """Return the coalitions that :func:`shapley` needs, each as the set of its replaced players.

    The recorded run is not among them. Each coalition is returned once, however many orders contain it: for n players
    at
    most 2^n - 1.
    """
    # The players not yet in are a suffix of the order. The empty suffix is the recorded run, whose worth is known.
    found = dict.fromkeys(frozenset(order[start:]) for order in orders for start in range(len(order)))
    return list(found)
