"""The parts around a learner: the traffic that it reads, the algorithms that propose, and the replays that compare."""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Literal, Protocol

from agl.schemas import Json, Record
from agl_inspect.records.learning import LearningCandidate, ReplayPair


class Conversation(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A served conversation with its feedback.

    Attributes:
        rollout_id: The rollout that records it.
        user: The user's name; ``""`` if the client sent none.
        started_at: Unix seconds.
        salt: The salt of the split that placed it, which is the candidate's id; ``""`` without one.
        arm: The label of its arm; ``""`` if no split placed it.
        share: The share of that arm when it began; 1 without a split.
        versions: The pinned version of each resource.
        task: The conversation as a task of the agent.
        kind: The kind of the task.
        question: What the user asked first.
        answer: The last answer.
        said: The text of the user's replies and reports, and of what the signals found; never a judge's text.
        reward: The reward from 0 to 1 that its feedback gives; ``None`` if there is no feedback.
        is_explicit: Whether the reward is what the user reported, such as a thumb.
        numbers: Measurements for the guards: ``latency`` in seconds and ``cost`` in tokens, both per question, and of
            the last answer ``refusals``, 0 or 1, and ``length`` in characters.
    """

    rollout_id: str
    user: str = ""
    started_at: float = 0.0
    salt: str = ""
    arm: str = ""
    share: float = 1.0
    versions: dict[str, str] = {}
    task: Json = None
    kind: str = ""
    question: str = ""
    answer: str = ""
    said: str = ""
    reward: float | None = None
    is_explicit: bool = False
    numbers: dict[str, float] = {}

    def unit(self, by: Literal["user", "conversation"]) -> str:
        """Return what is independent of the other conversations: the user, or the conversation without one."""
        return (self.user if by == "user" else "") or self.rollout_id


class SettledPage(Record, frozen=True, kw_only=True):
    """A page of settled conversations.

    Attributes:
        conversations: The conversations in the order in which they began; unusable ones are left out.
        after: The id of the last conversation that was read, from which the next page begins.
        after_value: When that conversation began, in Unix seconds.
        is_last: Whether no further conversation has settled.
    """

    conversations: Sequence[Conversation]
    after: str
    after_value: float
    is_last: bool


class Proposal(Record, frozen=True, kw_only=True):
    """Published versions that an algorithm proposes, and its name."""

    versions: dict[str, str]
    origin: str


class Traffic(Protocol):
    """Reads served conversations."""

    async def settled(self, *, after: str, after_value: float, now: float, limit: int) -> SettledPage:
        """Return up to ``limit`` conversations, from the one after ``after`` on.

        Only conversations that began at least the settling time before ``now`` are returned.
        """
        ...

    async def recent(self, *, now: float, limit: int) -> Sequence[Conversation]:
        """Return the newest settled conversations with a reward, newest first."""
        ...


class Proposer(Protocol):
    """Runs the algorithms on conversations."""

    async def propose(
        self, train: Sequence[Conversation], *, live: Mapping[str, str], number: int
    ) -> Sequence[Proposal]:
        """Return proposals, best first; empty if the algorithms found nothing new.

        A round that was interrupted is continued when it is asked for again with the same ``number``.
        """
        ...

    async def refusal(self, proposal: Proposal, *, live: Mapping[str, str], held_out: Sequence[Conversation]) -> str:
        """Return why a proposal may not be tried, such as a lost placeholder; ``""`` if it may.

        A text may not quote held-out conversations, on which it would look better than it is.
        """
        ...


class Replayer(Protocol):
    """Runs old and new versions on recorded conversations."""

    def pairs(
        self, candidate: LearningCandidate, held_out: Sequence[Conversation], *, done: Collection[str]
    ) -> AsyncGenerator[ReplayPair]:
        """Yield the pairs of the held-out conversations, in their order, and then of the regression tasks.

        A regression task's pair has the kind ``regression``, and its unit names the task. Units in ``done`` were
        yielded before and are left out. What ran before, also in a process that was killed, does not run again: the
        ids of the rollouts follow from the candidate and the conversation.
        """
        ...
