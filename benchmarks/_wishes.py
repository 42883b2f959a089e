"""A shop whose customers have a wish for each kind of question, and an optimiser that learns the wishes from them.

A version of the prompt is one letter for each kind. An answer is liked with the probability `GOOD` if the letter of its
kind is what the customers wish, else with `BAD`. The optimiser proposes for each kind the letter for which most of its
training conversations speak, and `?` for a kind without any: it forgets what it does not read. A liked answer speaks
for its letter; two of three disappointed customers name their wish, and the third any letter.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agl_inspect.records.labels import move
from agl_learn.contracts import Conversation
from agl_run import LearnSettings
from worlds.customers import PROMPT, Customers

GOOD, BAD = 0.85, 0.3
LETTERS = "abcde"
LIE = "e"
"""The letter that liars name instead of their wish."""

NEVER = 10**9
"""A number of conversations that a simulation does not reach."""


@dataclass(kw_only=True)
class Shop:
    """Customers, their wishes and the optimiser.

    Attributes:
        wish: Returns the wish for a kind at a number of a conversation.
        kinds: The kinds of questions, in the order of their letters.
        liars: The users who report the opposite of what they think, and the kinds about which they do.
    """

    wish: Callable[[str, int], str]
    settings: LearnSettings
    seed: int
    kinds: Sequence[str] = ("0",)
    liars: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    customers: Customers = field(init=False)

    def __post_init__(self) -> None:
        self.customers = Customers(
            liked=self.liked,
            propose=self.propose,
            kinds=self.kinds,
            liars=self.liars,
            seed=self.seed,
            settings=self.settings,
        )

    def liked(self, version: str, kind: str, number: int) -> float:
        """Return the probability that an answer is liked."""
        return GOOD if version[self.kinds.index(kind)] == self.wish(kind, number) else BAD

    def propose(self, train: Sequence[Conversation]) -> str | None:
        """Return the version for which the conversations speak."""
        votes = {kind: Counter("?") for kind in self.kinds}
        for each in train:
            votes[each.kind][self.spoken_for(each)] += 2
        return "".join(votes[kind].most_common(1)[0][0] for kind in self.kinds)

    def spoken_for(self, conversation: Conversation) -> str:
        """Return the letter for which a conversation speaks."""
        kind, number = conversation.kind, int(conversation.rollout_id[1:])
        if conversation.reward:
            return conversation.versions[PROMPT][self.kinds.index(kind)]
        if kind in self.liars.get(conversation.user, ()):
            return LIE
        chance = random.Random(f"{self.seed}/{number}")
        return self.wish(kind, number) if chance.random() < 2 / 3 else chance.choice(LETTERS)


def expected(customers: Customers) -> list[float]:
    """Return the probability with which each of the served answers was liked."""
    return [customers.liked(each.versions[PROMPT], each.kind, n) for n, each in enumerate(customers.past)]


async def promote_everything(customers: Customers, count: int, *, every: int = 40) -> None:
    """Serve conversations, and serve every proposal at once; the learner proposes nothing."""
    for _ in range(count // every):
        await customers.serve(every)
        version = customers.propose(customers.past[: -customers.settings.memory - 1 : -1])
        if version is not None:
            await move(customers.store, PROMPT, customers.settings.label, await customers.publish(version))
