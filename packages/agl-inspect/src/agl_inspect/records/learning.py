"""Records of learning while serving: candidates, their observations and decisions, in the store's state.

`agl learn` writes them. Its commands and the console read them. All keys begin with ``learn/NAME/``, where NAME is the
learner's name in its file.
"""

from typing import Literal

from agl.contracts import Store
from agl.schemas import Json, Record
from agl_inspect.records.shelf import Shelf

Stage = Literal["replay", "approval", "canary", "watch", "suspicion", "accepted", "refused", "withdrawn", "rolled back"]
"""The stages of a candidate, in their usual order; the last four are final.

``watch`` begins with the promotion. ``suspicion`` follows it if the rewards have fallen: half of the traffic gets the
old versions, until it is clear whether the new ones are the cause.
"""

FINAL: frozenset[Stage] = frozenset({"accepted", "refused", "withdrawn", "rolled back"})


class Move(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A candidate's entry into a stage, or a change of its share.

    Attributes:
        at: Unix seconds.
        share: The share of the traffic that gets the candidate from then on.
        reason: The reason, with the evidence, as text.
        first: The number of units that were counted before.
    """

    stage: Stage
    at: float
    share: float
    reason: str
    first: int = 0


class GateRules(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The settings that decide about a candidate, as they were when it was proposed.

    Attributes:
        error: The largest probability that the learner ever promotes a candidate that is no better.
        gain: The gain in reward that a replay has to prove.
        tasks: The most conversations of a replay.
        guard: The guards of the canary.
    """

    error: float = 0.05
    gain: float = 0.0
    tasks: int = 200
    guard: tuple[str, ...] = ()


class LearningCandidate(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Versions that may replace those that are served.

    Attributes:
        id: ``c1``, ``c2`` and so on.
        number: The position among the candidates that spent a part of the error, from 1.
        versions: The proposed version of each resource that it changes.
        baseline: The versions that it would replace.
        origin: The algorithm that made it, such as ``apo``.
        conversations: The number of conversations whose feedback the algorithm learned from.
        limits: For each guard of the canary, the number that an answer may reach; see :class:`ServedUnit`.
        moves: Its stages so far, oldest first.
        rules: The settings that decide about it.
    """

    id: str
    number: int
    versions: dict[str, str]
    baseline: dict[str, str]
    origin: str
    conversations: int
    created_at: float
    moves: list[Move]
    rules: GateRules
    limits: dict[str, float] = {}

    @property
    def stage(self) -> Stage:
        """The present stage."""
        return self.moves[-1].stage

    @property
    def share(self) -> float:
        """The present share of the traffic."""
        return self.moves[-1].share


class ReplayPair(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rewards of the old and the new versions on a unit's held-out conversations, as means over them.

    Attributes:
        unit: The user, or the conversation if the user is unknown.
        kind: The kind of the task, or several with commas between them; ``""`` if kinds are not distinguished.
        kinds: The rewards of the old and the new versions on each kind of task.
        control: The reward of a second, identical run of the old versions; ``None`` without one.
        rollouts: The ids of the rollouts behind the rewards: old, new, control, for each conversation.
    """

    unit: str
    kind: str
    old: float
    new: float
    control: float | None = None
    rollouts: list[str] = []
    kinds: dict[str, tuple[float, float]] = {}


class LearningRound(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The tasks of a round of training, which an interrupted round continues with.

    Attributes:
        train: The training tasks.
        val: The validation tasks.
    """

    train: list[Json]
    val: list[Json]


class ServedUnit(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A user, or a conversation without a user, that a split gave to an arm.

    Attributes:
        candidate: The id of the candidate.
        kind: The kind of its first task.
        is_new: Whether it got the candidate.
        share: The candidate's share when its first conversation began.
        reward: The mean reward of its conversations.
        guards: For each guard, 1 if it holds and 0 if it is violated, such as 0 for an answer that was too slow.
        rollouts: The ids of its conversations.
        at: When its first conversation began, in Unix seconds.
    """

    unit: str
    candidate: str
    kind: str
    is_new: bool
    share: float
    reward: float
    guards: dict[str, float] = {}
    rollouts: list[str] = []
    at: float = 0.0


class Decision(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A verdict of a gate, which can be computed again from the observations that it names.

    Attributes:
        id: ``c3-replay``, ``c3-canary``, ``c3-guard-latency`` and so on.
        stage: The stage in which it was made.
        gate: The name of the gate, which says what was compared.
        verdict: The gate's verdict.
        evidence: The odds that the new versions are better.
        evidence_of_harm: The odds that they are worse.
        error: The gate's error.
        gain: The gain that was asked for.
        first: The number of the stage's first observation, counted from 0.
        end: The number of observations at the time of the decision.
        count: The number of observations that the gate used.
        mean: The estimated gain.
        lower: Its lower bound.
        upper: Its upper bound.
        needed: About how many observations would have led to a verdict; ``None`` if no number would.
    """

    id: str
    candidate: str
    stage: Stage
    gate: str
    verdict: str
    evidence: float
    evidence_of_harm: float
    error: float
    gain: float
    first: int
    end: int
    count: int
    mean: float
    lower: float
    upper: float
    needed: int | None
    at: float


class LearnerState(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What a learner has to know after a restart.

    Attributes:
        after: The id of the last conversation that was counted; see :meth:`agl.contracts.RolloutQuery.next`.
        after_value: When that conversation began, in Unix seconds.
        open: Units whose window is not over, by name; see :class:`ServedUnit`. Their rewards are sums.
        current: The id of the candidate in replay, approval or canary; ``""`` without one.
        watched: The id of the promoted candidate in watch or suspicion; ``""`` without one.
        candidates: The number of candidates so far.
        rounds: The number of training rounds so far.
        rated: The number of conversations with a reward so far.
        learned: ``rated`` at the last training round.
        is_learning: Whether that round has not ended.
        changed_at: When the users last changed, in Unix seconds: rewards have fallen since then. Earlier conversations
            are neither trained on nor replayed.
        labels: When the label of each resource moved last, as far as the learner knows; a later move is a person's.
        excluded: Users whose feedback does not count, with the reason.
    """

    after: str = ""
    after_value: float = 0.0
    open: dict[str, ServedUnit] = {}
    current: str = ""
    watched: str = ""
    candidates: int = 0
    rounds: int = 0
    rated: int = 0
    learned: int = 0
    is_learning: bool = False
    changed_at: float = 0.0
    labels: dict[str, float] = {}
    excluded: dict[str, str] = {}


class LearnerControl(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What people ask of a learner. The commands write it, and the learner only reads it.

    Attributes:
        is_paused: Whether no candidate may be proposed, and no share may grow.
        approved: The ids of the candidates that a person approved.
        rejected: The ids of the candidates that a person rejected, with the reason.
    """

    is_paused: bool = False
    approved: list[str] = []
    rejected: dict[str, str] = {}


class LearningRecords:
    """The shelves of one learner, by name.

    Attributes:
        state: The learner's state; a single record.
        control: The wishes of people; a single record.
        candidates: Candidates by id.
        decisions: Decisions by id.
        rounds: Rounds of training, by :func:`entry_name`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        base = f"learn/{name}/"
        self.state = Shelf(LearnerState, f"{base}state/")
        self.control = Shelf(LearnerControl, f"{base}control/")
        self.candidates = Shelf(LearningCandidate, f"{base}candidates/")
        self.decisions = Shelf(Decision, f"{base}decisions/")
        self.rounds = Shelf(LearningRound, f"{base}rounds/")
        self._base = base

    def pairs(self, candidate: str) -> Shelf[ReplayPair]:
        """The replayed pairs of a candidate."""
        return Shelf(ReplayPair, f"{self._base}pairs/{candidate}/")

    def units(self, candidate: str) -> Shelf[ServedUnit]:
        """The served units of a candidate's canary and watch."""
        return Shelf(ServedUnit, f"{self._base}units/{candidate}/")


def entry_name(number: int) -> str:
    """Return the name of an observation, so that names sort like numbers."""
    return f"{number:08d}"


async def learners(store: Store) -> list[str]:
    """Return the names of all learners that have worked on a store."""
    found = await store.load_state("learn/")
    return sorted({key.split("/")[1] for key in found if key.split("/")[2] == "state"})
