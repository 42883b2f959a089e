"""The parts of :mod:`worlds.kuhn` that an experiment runs: the game as an agent, and an algorithm for one player.

A player is a table of logits, a resource that the agent gets with every game; there is no model server. Store, runner,
schedule, versions and the estimators of agl-objectives are those of any experiment.

    plugins = PluginManager.from_environment()
    plugins.register(KuhnPlugin(), name="kuhn")
    trainer = agl.Trainer(
        algorithm=[
            algorithm("kuhn", name="one", tunes="first"),
            algorithm("kuhn", name="two", tunes="second", source="one"),
        ],
        initial_resources=first_tables(seed=0),
        schedule={"mode": "alternate"},
        plugins=plugins,
    )
    trainer.fit(play, train_dataset=tasks())
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import agl
from agl.contracts import AlgorithmContext, Collected, Recorded, StepReport
from agl.schemas import CallCredit, Episode, Json, JsonResource
from agl_objectives.advantages import call_advantages
from agl_objectives.registry import find_estimator
from worlds.kuhn import CARDS, DEALS, ENDS, SITUATIONS, Policy, payoff

SIDES = ("first", "second")

Table = dict[str, float]
"""The logit of a bet or a call, by the player's card and the moves before."""


@dataclass(frozen=True, kw_only=True)
class Game:
    """A game of players with two moves each.

    Args:
        sides: The players' names.
        signs: What each player wins, as a multiple of the rollout's reward.
        moves: Returns what a player saw at each of its moves, and whether it bet or called.
    """

    sides: Sequence[str]
    signs: Sequence[int]
    moves: Callable[[Episode, int], list[tuple[str, bool]]]


def tasks() -> list[Json]:
    """Return one task for each deal."""
    return [dict(zip(SIDES, deal, strict=True)) for deal in DEALS]


def first_tables(*, seed: int) -> dict[str, JsonResource]:
    """Return both players' tables before training, by side; they bet and call about half of the time."""
    draw = random.Random(seed)
    seen = [[card + before for before in before_own for card in CARDS] for before_own in SITUATIONS]
    return {
        side: JsonResource(value={one: draw.gauss(0.0, 0.3) for one in own})
        for side, own in zip(SIDES, seen, strict=True)
    }


def policy_of(table: Table, side: int) -> Policy:
    """Return a player's probabilities of a bet or a call."""
    return [[_chance(table[card + before]) for card in CARDS] for before in SITUATIONS[side]]


def _chance(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


async def play(task: Any, rollout: Any, first: Table, second: Table) -> None:
    """Deal the task's cards and draw both players' moves; the reward is what the first player wins."""
    draw, history = random.Random(rollout.metadata["seed"]), ""
    while history not in ENDS:
        side = len(history) % 2
        logit = (first, second)[side][CARDS[task[SIDES[side]]] + history]
        history += "b" if draw.random() < _chance(logit) else "p"
    agl.emit_reward(payoff(task["first"], task["second"], history), feedback=history)


def moves(episode: Episode, side: int) -> list[tuple[str, bool]]:
    """Return what a player saw at each of its moves, and whether it bet or called."""
    history, card = episode.rewards[0].feedback, CARDS[episode.rollout.task[SIDES[side]]]
    return [(card + history[:at], history[at] == "b") for at in range(side, len(history), 2)]


def gradient(
    groups: Sequence[Sequence[Episode]], table: Table, *, game: Game, side: int, estimator: str, entropy: float
) -> Table:
    """Return the policy gradient with an entropy bonus, as a mean over the player's moves.

    For a logit z, p = sigmoid(z) and H = the entropy of p:

        d log p(bet) / dz = 1 - p,    d log p(pass) / dz = -p,    dH / dz = -z p (1 - p)
    """
    games = [(number, episode) for number, group in enumerate(groups) for episode in group]
    credits = [
        [
            CallCredit(span_id=f"{move}", value=game.signs[side] * (episode.reward or 0.0), baseline=f"{number}")
            for move, _ in enumerate(game.moves(episode, side))
        ]
        for number, episode in games
    ]
    advantages = call_advantages(
        credits, groups=[number for number, _ in games], tokens={}, estimator=find_estimator(estimator).call
    )
    found, count = dict.fromkeys(table, 0.0), sum(map(len, credits))
    for (_, episode), own in zip(games, advantages, strict=True):
        for (seen, is_bet), advantage in zip(game.moves(episode, side), own.values(), strict=True):
            z, p = table[seen], _chance(table[seen])
            found[seen] += (advantage * (is_bet - p) - entropy * z * p * (1 - p)) / count
    return found


class Tabular:
    """Learns the table of one player of :attr:`game` by policy gradients.

    Args:
        steps: Number of steps.
        group_size: Games per task and step.
        lr: Step length.
        entropy: Weight of the entropy bonus.
        estimator: An estimator of agl-objectives.
        league: Number of versions of the other player, in a game of two, from which each step draws its opponent; 0 for
            the live one.
    """

    game: Game

    def __init__(
        self,
        *,
        steps: int = 200,
        group_size: int = 8,
        lr: float = 4.0,
        entropy: float = 0.1,
        estimator: str = "dr_grpo",
        league: int = 0,
    ) -> None:
        self._steps, self._size, self._lr, self._league = steps, group_size, lr, league
        self._entropy, self._estimator = entropy, estimator
        self._step, self._after = 0, dict[str, int]()

    async def setup(self, context: AlgorithmContext) -> None:
        """Keep the context."""
        self._context = context
        (self._name,) = context.tunes
        self._side = self.game.sides.index(self._name)

    async def step(self) -> StepReport:
        """Take the source's games or play new ones, take a gradient step, and publish the table."""
        found = await self._games()
        table = self._context.current(self._name).resource.value
        slope = gradient(
            found.groups(),
            table,
            game=self.game,
            side=self._side,
            estimator=self._estimator,
            entropy=self._entropy,
        )
        moved = {seen: logit + self._lr * slope[seen] for seen, logit in table.items()}
        self._step += 1
        await self._context.publish(self._name, JsonResource(value=moved), step=self._step)
        return StepReport(
            step=self._step,
            is_finished=self._step >= self._steps,
            trained=tuple(episode.rollout.rollout_id for episode in found.episodes),
        )

    async def _games(self) -> Collected | Recorded:
        context = self._context
        if context.sources:
            found = await context.recorded(after=self._after)
            self._after = found.steps
            return found
        rival = self.game.sides[1 - self._side]
        versions = [one.version for one in await context.store.resources(rival)] if self._league else []
        drawn = random.Random(f"{context.seed}/{self._name}/{self._step}").choice(versions[-self._league :] or [""])
        pinned = {rival: drawn} if drawn else None
        return await context.collect(context.train, step=self._step + 1, n=self._size, resources=pinned)

    def state(self) -> dict[str, Json]:
        """Return the number of steps done, and the steps of the source that are done."""
        return {"step": self._step, "after": self._after}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from :meth:`state`."""
        self._step, self._after = state["step"], state["after"]

    async def close(self) -> None:
        """Do nothing: nothing is held open."""


class Kuhn(Tabular):
    """Learns the table of one player of Kuhn poker."""

    game = Game(sides=SIDES, signs=(1, -1), moves=moves)


class KuhnPlugin:
    """Registers the algorithm ``kuhn``."""

    @agl.hookimpl
    def agl_algorithms(self) -> Iterable[agl.AlgorithmEntry]:
        """Register policy gradients on a player's table."""
        yield agl.AlgorithmEntry(name="kuhn", factory=Kuhn, tunes=("json",), needs_token_ids=False, shares=True)
