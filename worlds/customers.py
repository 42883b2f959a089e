"""Customers of a served agent, simulated: they ask, rate the answer, and sometimes change their wish or lie.

An answer is liked with a probability that depends on the version that gave it, on the kind of the question and on the
number of the conversation; nothing else of an agent matters to a learner. The traffic, the proposals and the replays of
:class:`agl_learn.learner.Learner` are simulated, its store and its decisions are real.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import msgspec

from agl.contracts import Store
from agl.schemas import PromptTemplate, ResourceVersion
from agl.stores import MemoryStore
from agl_inspect.records.learning import LearningCandidate, ReplayPair
from agl_learn.contracts import Conversation, Proposal, SettledPage
from agl_learn.learner import Learner, Parts
from agl_run import LearnSettings

PROMPT = "prompt"

Liked = Callable[[str, str, int], float]
"""Returns the probability that an answer is liked, from the version, the kind and the number of the conversation."""


@dataclass(kw_only=True)
class Customers:
    """Serves simulated conversations, and runs a learner on them.

    Attributes:
        liked: How well each version answers.
        propose: Returns the version to propose from rated conversations, newest first; ``None`` for no proposal.
        users: The number of users; 0 for a new one in every conversation.
        heavy: How many users ask 30 % of all questions.
        liars: The users who report the opposite of what they think, and the kinds about which they do.
        kinds: The kinds of questions.
        seed: Of all chance.
        settings: Of the learner.
        regression: The number of regression tasks, of the kind ``regression``.
        lag: Conversations that a replay or a round of training takes.
        settle_s: Of the learner.
        contradicting: Names users whose feedback does not count.
        weights: The resources that a host has to serve.
    """

    liked: Liked
    propose: Callable[[Sequence[Conversation]], str | None]
    settings: LearnSettings
    users: int = 0
    heavy: int = 0
    liars: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    kinds: Sequence[str] = ("",)
    seed: int = 0
    regression: int = 0
    settle_s: float = 0.0
    lag: int = 0
    contradicting: Callable[[Sequence[Conversation], Sequence[Mapping[str, str]]], Mapping[str, str]] = lambda *_: {}
    weights: Sequence[str] = ()
    store: Store = field(default_factory=MemoryStore)
    past: list[Conversation] = field(default_factory=list[Conversation])
    truth: list[float] = field(default_factory=list[float])
    said: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.now = 0.0
        self._published: set[str] = set()

    async def open(self, first: str) -> Learner:
        """Begin to serve the version ``first``."""
        self.first = await self.publish(first)
        return await self.restart()

    async def restart(self, **more: str) -> Learner:
        """Start a new learner on the same store, with the versions of more resources."""
        parts = Parts(
            traffic=self,
            proposer=SimulatedProposer(self),
            replayer=self,
            contradicting=self.contradicting,
            clock=lambda: self.now,
            say=self.said.append,
        )
        self.learner = Learner(
            self.store,
            name="support",
            settings=self.settings,
            settle_s=self.settle_s,
            parts=parts,
            weights=self.weights,
        )
        await self.learner.start(versions={PROMPT: self.first, **more})
        return self.learner

    async def serve(self, count: int, *, until: Callable[[], bool] = lambda: False) -> None:
        """Serve conversations, with a tick of the learner after each."""
        due = 0
        for _ in range(count):
            self._converse()
            await self.learner.tick()
            due = due + 1 if self.learner.is_busy else 0
            if due > self.lag:
                await self.learner.finish_work()
            if until():
                return

    def _converse(self) -> None:
        number = len(self.past)
        self.now += 1.0
        first = self.heavy if self.heavy and self.chance.random() < 0.3 else self.users
        user = f"u{self.chance.randrange(first)}" if self.users else f"u{number}"
        kind = self.chance.choice(self.kinds)
        split = self.learner.split
        point = int.from_bytes(blake2b(f"{split.salt}/{self.seed}/{user}".encode(), digest_size=8).digest()) / 2**64
        arm = next(iter(split.shares))
        for label, share in split.shares.items():
            arm = label
            if point < share:
                break
            point -= share
        versions = split.versions[arm]
        is_liked = self.chance.random() < self.liked(versions[PROMPT], kind, number)
        reported = is_liked != (kind in self.liars.get(user, ()))
        self.truth.append(float(is_liked))
        self.past.append(
            Conversation(
                rollout_id=f"r{number:06d}",
                user=user,
                started_at=self.now,
                salt=split.salt,
                arm=arm,
                share=split.shares[arm],
                versions=dict(versions),
                kind=kind,
                reward=float(reported),
                is_explicit=True,
                numbers={"latency": self.chance.expovariate(1.0), "refusals": 0.0},
            )
        )

    # The learner's traffic

    async def settled(self, *, after: str, after_value: float, now: float, limit: int) -> SettledPage:
        """Return the conversations after ``after``."""
        first = int(after[1:]) + 1 if after else 0
        page = self.past[first : first + limit]
        last = page[-1] if page else Conversation(rollout_id=after, started_at=after_value)
        return SettledPage(
            conversations=page, after=last.rollout_id, after_value=last.started_at, is_last=len(page) < limit
        )

    async def recent(self, *, now: float, limit: int) -> Sequence[Conversation]:
        """Return the newest conversations."""
        return self.past[-limit:][::-1]

    # The learner's algorithms and replays

    async def propose_version(self, train: Sequence[Conversation]) -> Sequence[Proposal]:
        """Publish and propose a version, unless it is served already."""
        version = self.propose(train)
        if version is None or version == self.learner.split.versions[self.settings.label][PROMPT]:
            return []
        await self.publish(version)
        return [Proposal(versions={PROMPT: version}, origin="the world")]

    async def pairs(
        self, candidate: LearningCandidate, held_out: Sequence[Conversation], *, done: Collection[str]
    ) -> AsyncGenerator[ReplayPair]:
        """Judge both versions as the customer of each conversation would, and then on the regression tasks."""
        for each in held_out:
            number = int(each.rollout_id[1:])
            old, new, control = (
                float(self.chance.random() < self.liked(version, each.kind, number))
                for version in (candidate.baseline[PROMPT], candidate.versions[PROMPT], candidate.baseline[PROMPT])
            )
            yield ReplayPair(unit=each.user, kind=each.kind, old=old, new=new, control=control)
        for unit in (f"regression-{number}" for number in range(self.regression)):
            if unit not in done:
                await asyncio.sleep(0)
                old, new = (self.liked(version[PROMPT], "regression", 0) for version in _both(candidate))
                yield ReplayPair(unit=unit, kind="regression", old=float(old > 0.5), new=float(new > 0.5))

    async def publish(self, version: str) -> str:
        """Publish a version once; returns its name."""
        if version not in self._published:
            self._published.add(version)
            resource = PromptTemplate(template=version)
            await self.store.publish([ResourceVersion(name=PROMPT, version=version, resource=resource)])
        return version


def _both(candidate: LearningCandidate) -> tuple[dict[str, str], dict[str, str]]:
    return candidate.baseline, candidate.versions


class SimulatedProposer:
    """Fulfils the contract of proposers for customers."""

    def __init__(self, customers: Customers) -> None:
        self._customers = customers

    async def propose(
        self, train: Sequence[Conversation], *, live: Mapping[str, str], number: int
    ) -> Sequence[Proposal]:
        """Return the world's proposal."""
        return await self._customers.propose_version(train)

    async def refusal(self, proposal: Proposal, *, live: Mapping[str, str], held_out: Sequence[Conversation]) -> str:
        """Refuse nothing."""
        return ""


def settings(
    *,
    every: int = 40,
    tasks: int = 200,
    share: tuple[float, ...] = (0.05, 0.2, 0.5),
    units: int = 20,
    unit: Literal["user", "conversation"] = "user",
    error: float = 0.05,
    approve: Literal["auto", "person"] = "auto",
) -> LearnSettings:
    """Return a learner's settings for a simulation."""
    canary = {"share": share, "units": units, "guard": ()}
    gate = {"replay": {"tasks": tasks}, "canary": canary, "error": error, "approve": approve}
    given = {"tunes": (PROMPT,), "every": every, "unit": unit, "gate": gate}
    return msgspec.convert(given, LearnSettings)
