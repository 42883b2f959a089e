"""A team of three agents whose contributions are known: a free-rider, a saboteur and a hero.

In every room each of them says one word. The hero earns 1 for the room's right word; the saboteur does damage with
every word but the room's right one; what the free-rider says changes nothing. An agent that says nothing earns
nothing and does no damage. So the team's reward, what each agent added to it, and the expected reward of a policy
that draws words at random are all known in closed form.
"""

import math
from collections.abc import Mapping, Sequence

ROLES = ("rider", "saboteur", "hero")
WORDS = ("north", "south", "east", "west", "up", "down", "in", "out")
ROOMS = ("hall", "kitchen", "cellar", "attic")
DAMAGE = 3.0
"""The most that one word of the saboteur costs; other harmful words cost a quarter, a half or three quarters of it."""

Table = Mapping[str, Sequence[float]]
"""Logits over :data:`WORDS` by ``"role/room"``."""


def right_word(room: str) -> str:
    """Return a room's right word: the hero earns 1 with it, and the saboteur does no damage with it."""
    return WORDS[ROOMS.index(room)]


def contributions(room: str, said: Mapping[str, str]) -> dict[str, float]:
    """Return the part of the reward that each role added; the parts sum to :func:`reward`."""
    return {
        "rider": 0.0,
        "saboteur": -damage(room, said.get("saboteur", "")),
        "hero": float(said.get("hero", "") == right_word(room)),
    }


def damage(room: str, word: str) -> float:
    """Return the cost of a word of the saboteur, from 0 to :data:`DAMAGE`."""
    right = right_word(room)
    if word not in WORDS or word == right:
        return 0.0
    # Words at distance 1 to 7 from the right one, going round: costs 1/4, 2/4, 3/4, 4/4, 1/4, 2/4, 3/4 of DAMAGE.
    distance = (WORDS.index(word) - WORDS.index(right)) % len(WORDS)
    return DAMAGE * (1 + (distance - 1) % 4) / 4


def reward(room: str, said: Mapping[str, str]) -> float:
    """Return the team's reward for the words that its roles said in a room, at most 1."""
    return math.fsum(contributions(room, said).values())


def uniform() -> dict[str, list[float]]:
    """Return the table of the policy that says every word equally often."""
    return {key(role, room): [0.0] * len(WORDS) for role in ROLES for room in ROOMS}


def key(role: str, room: str) -> str:
    """Return the key of a role's logits for a room in a table."""
    return f"{role}/{room}"


def probabilities(logits: Sequence[float]) -> list[float]:
    """Return the softmax of the logits; [len(WORDS)] in and out."""
    top = max(logits)  # subtracted before exp, which cannot overflow then; the softmax stays the same
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def expected_reward(table: Table) -> float:
    """Return the expected reward of a policy, exactly: the mean over rooms, and over words by their probabilities."""
    return math.fsum(_expected(table, room) for room in ROOMS) / len(ROOMS)


def expected_contributions(table: Table, room: str) -> dict[str, float]:
    """Return the expected part of the reward that each role adds in a room, exactly."""
    # The hero adds P(it says the right word), the saboteur - sum over words w of P(it says w) * damage(w).
    hero = probabilities(table[key("hero", room)])[WORDS.index(right_word(room))]
    chances = probabilities(table[key("saboteur", room)])
    lost = math.fsum(chance * damage(room, word) for chance, word in zip(chances, WORDS, strict=True))
    return {"rider": 0.0, "saboteur": -lost, "hero": hero}


def _expected(table: Table, room: str) -> float:
    return math.fsum(expected_contributions(table, room).values())
