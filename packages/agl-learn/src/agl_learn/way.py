"""A candidate on its way: its observations, the gates that they fed, and the sentences about these."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from agl.acceptance import Gate, odds_text
from agl.contracts import Store
from agl.hints import count_of
from agl_inspect.learning import add_pair, add_unit, first_unit, replay_gates, served_gates
from agl_inspect.records.learning import LearningCandidate, LearningRecords, Move, ReplayPair, ServedUnit, Stage
from agl_learn.contracts import Conversation


class Way:
    """A candidate on its way, with its observations and the gates that they fed.

    Attributes:
        candidate: The candidate as recorded.
        pairs: The pairs of its replay.
        units: The units of its canary and watch.
        counted: The names of the units of its present stage, in which each counts once.
        replay: The gates of its replay.
        gates: The gates of its present stage, if that serves it.
        is_replayed: Whether its replay has ended with a verdict.
        obstacle: Why its replay ended without a verdict; ``""`` while it may go on.
        rated_at_end: The number of rated conversations when its replay had no further one to run; -1 before.
        rated_at_pair: The number of rated conversations when its replay added a pair, or began.
        answers: How many rated conversations of users who were counted before got the candidate at its present share,
            since the learner started.
    """

    def __init__(
        self, candidate: LearningCandidate, *, pairs: Sequence[ReplayPair] = (), units: Sequence[ServedUnit] = ()
    ) -> None:
        self.candidate = candidate
        self.pairs, self.units = list(pairs), list(units)
        self.counted: set[str] = set()
        self.replay = replay_gates(candidate.rules, number=candidate.number, pairs=pairs)
        self.gates: dict[str, Gate] = {}
        self.is_replayed, self.obstacle, self.rated_at_end = False, "", -1
        self.rated_at_pair = self.answers = 0
        if candidate.moves and candidate.stage in _SERVED:
            present = self.units[first_unit(candidate) :]
            self.counted = {unit.unit for unit in present}
            self.gates = served_gates(candidate.rules, candidate.stage, present)

    @classmethod
    async def load(cls, store: Store, records: LearningRecords, candidate: LearningCandidate) -> "Way":
        """Read a candidate's observations."""
        pairs = await records.pairs(candidate.id).read(store)
        units = await records.units(candidate.id).read(store)
        return cls(candidate, pairs=list(pairs.values()), units=list(units.values()))

    @property
    def stage(self) -> Stage:
        """The present stage."""
        return self.candidate.stage

    def enter(self, entry: Move) -> None:
        """Add a move; a new stage begins with new gates."""
        is_new_stage = not self.candidate.moves or entry.stage != self.stage
        self.candidate = replace(self.candidate, moves=[*self.candidate.moves, entry])
        self.answers = 0
        if is_new_stage and entry.stage in _SERVED:
            self.counted = set()
            self.gates = served_gates(self.candidate.rules, entry.stage, ())

    def add_pair(self, pair: ReplayPair) -> None:
        """Add a pair."""
        self.pairs.append(pair)
        add_pair(self.replay, pair, self.candidate.rules)

    def add_unit(self, unit: ServedUnit) -> int:
        """Add a unit; returns its number."""
        self.units.append(unit)
        self.counted.add(unit.unit)
        add_unit(self.gates, unit)
        return len(self.units) - 1

    def served_at_share(self) -> int:
        """Return how many units got the candidate since its share last changed."""
        return sum(unit.is_new and self.is_at_share(unit.at) for unit in self.units[self.candidate.moves[-1].first :])

    def is_at_share(self, began: float) -> bool:
        """Return whether a conversation that began at this time was placed at the present share."""
        return began >= self.candidate.moves[-1].at

    def guards(self, conversation: Conversation) -> dict[str, float]:
        """Return for each guard 1 if the conversation keeps its limit, else 0."""
        limits = self.candidate.limits
        return {
            name: float(conversation.numbers[name] <= limit)
            for name, limit in limits.items()
            if name in conversation.numbers
        }


_SERVED = ("canary", "watch", "suspicion")


def serves(conversation: Conversation, versions: Mapping[str, str]) -> bool:
    """Return true if the conversation got these versions."""
    return all(conversation.versions.get(name) == version for name, version in versions.items())


def harm_in(gates: Mapping[str, Gate]) -> str:
    """Return what speaks against a candidate besides its replay: its control, a kind of task, the regression tasks."""
    if "control" in gates and gates["control"].verdict in ("better", "worse"):
        return f"two runs of the versions before differ, so rewards cannot be compared: {gates['control'].words}"
    worse = (name for name, gate in gates.items() if name not in ("replay", "control") and gate.verdict == "worse")
    return next((f"{title_of(name)}: {gates[name].words}" for name in worse), "")


def harm_words(gate: Gate) -> str:
    """Describe the evidence of harm."""
    return f"{odds_text(gate.evidence_of_harm)} for harm after {count_of(gate.count, 'unit')}"


def doubt(gate: Gate) -> str:
    """Return why a replay proves nothing; ``""`` if it does."""
    return "" if gate.verdict == "better" else gate.words


def title_of(gate: str) -> str:
    """Return what a gate found, such as ``worse in the canary``."""
    kind, _, name = gate.partition("-")
    if kind == "guard":
        return f"{name} got worse in the canary"
    if kind == "kind":
        return f"worse on tasks of the kind {name}"
    return {"canary": "worse in the canary", "regression": "worse on the regression tasks"}.get(gate, gate)
