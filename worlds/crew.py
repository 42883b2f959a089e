"""A crew of five agents in a row, each of which says yes or no and should say what its neighbours say.

At first each prefers the opposite of its neighbours' answers. The reward is the share of neighbours that agree, so a
change of one agent's habit is right or wrong only by the habits of the next. The expected reward follows from the
agents' probabilities exactly.
"""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import agl
from agl.schemas import Episode, JsonResource
from worlds.kuhn_run import Game, Table, Tabular

AGENTS = ("first", "second", "third", "fourth", "fifth")


def first_tables() -> dict[str, JsonResource]:
    """Return the agents' tables before training: each says its preferred answer two times out of three."""
    return {agent: JsonResource(value={"": 0.7 * (-1) ** at}) for at, agent in enumerate(AGENTS)}


def expected_reward(tables: Sequence[Table]) -> float:
    """Return the expected share of neighbours that agree, exactly."""
    chances = [_chance(table) for table in tables]
    return math.fsum(p * q + (1 - p) * (1 - q) for p, q in pairwise(chances)) / (len(AGENTS) - 1)


def _chance(table: Table) -> float:
    return 1.0 / (1.0 + math.exp(-table[""]))


async def answer(
    task: Any, rollout: Any, first: Table, second: Table, third: Table, fourth: Table, fifth: Table
) -> None:
    """Draw each agent's answer, and reward the share of neighbours that agree."""
    draw = random.Random(rollout.metadata["seed"])
    said = "".join("y" if draw.random() < _chance(table) else "n" for table in (first, second, third, fourth, fifth))
    agl.emit_reward(sum(one == next_one for one, next_one in pairwise(said)) / (len(AGENTS) - 1), feedback=said)


def _moves(episode: Episode, side: int) -> list[tuple[str, bool]]:
    return [("", episode.rewards[0].feedback[side] == "y")]


class Crew(Tabular):
    """Learns the table of one agent of the crew."""

    game = Game(sides=AGENTS, signs=(1,) * len(AGENTS), moves=_moves)


class CrewPlugin:
    """Registers the algorithm ``crew``."""

    @agl.hookimpl
    def agl_algorithms(self) -> Iterable[agl.AlgorithmEntry]:
        """Register policy gradients on an agent's table."""
        yield agl.AlgorithmEntry(name="crew", factory=Crew, tunes=("json",), needs_token_ids=False, shares=True)
