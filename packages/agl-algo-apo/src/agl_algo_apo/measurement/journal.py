"""The journal of a search: why each candidate was made, the gates that it met, and the costs of it.

It is part of the search's state and written with it, so a step that is repeated after a crash leaves one entry, and
`agl resources` reads it from the store.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from agl.schemas import Json, Record
from agl_algo_apo.measurement.estimates import Estimate, Range, estimate
from agl_algo_apo.search.budget import Spent

STATIC = "static gate"
"""The gate that costs no rollout: placeholders, invariants, length, copies."""


class GateReport(Record, frozen=True, kw_only=True):
    """The outcome of one gate for one candidate.

    Attributes:
        gate: The gate's name, in words.
        has_passed: Whether the candidate passed it.
        step: The step in which it was met.
        rival: Id of the candidate that it was compared with, ``""`` where there was none.
        score: Mean reward of the candidate on the tasks that both were measured on; ``rival_score`` of the rival.
        gain: Mean of the paired differences with their interval; its ``n`` is the number of pairs.
        reason: The reason of a gate that compares nothing.
    """

    gate: str
    has_passed: bool
    step: int
    rival: str = ""
    score: float | None = None
    rival_score: float | None = None
    gain: Estimate | None = None
    reason: str = ""


class JournalEntry(Record, frozen=True, kw_only=True):
    """Everything about one candidate that is neither its text nor its fate.

    Attributes:
        evidence: Ids of the rollouts that the critic was shown.
        gates: The gates that it met, in order.
        scores: Its mean rewards by their origin, such as ``selection`` and ``test tasks``.
        agent: Rollouts of the agent that were run for it, with the tokens of their recorded model calls.
        optimizer: Questions to the optimiser's model from which it came, with their tokens.
    """

    evidence: tuple[str, ...] = ()
    gates: tuple[GateReport, ...] = ()
    scores: dict[str, Estimate] = {}
    agent: Spent = Spent()
    optimizer: Spent = Spent()


class Journal:
    """Collects the entries of all candidates."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}

    def __getitem__(self, candidate: str) -> JournalEntry:
        return self._entries.get(candidate, JournalEntry())

    def proposed(self, candidate: str, *, evidence: Sequence[str] = (), spent: Spent | None = None) -> None:
        """Note a proposal: the rollouts that its critic was shown, and the questions that it took."""
        entry = self[candidate]
        shown = tuple(dict.fromkeys((*entry.evidence, *evidence)))
        self._change(candidate, evidence=shown, optimizer=entry.optimizer.plus(spent or Spent()))

    def paid(self, candidate: str, spent: Spent) -> None:
        """Note rollouts of the agent, or the tokens of their model calls."""
        self._change(candidate, agent=self[candidate].agent.plus(spent))

    def met(self, candidate: str, report: GateReport) -> None:
        """Note the outcome of a gate."""
        self._change(candidate, gates=(*self[candidate].gates, report))

    def scored(self, candidate: str, how: str, score: Estimate) -> None:
        """Note a score by its origin; a newer one of the same origin replaces it."""
        self._change(candidate, scores={**self[candidate].scores, how: score})

    def dump(self) -> dict[str, Json]:
        """Return the entries by candidate, as JSON."""
        return msgspec.json.decode(msgspec.json.encode(self._entries))

    def load(self, data: Json) -> None:
        """Continue from :meth:`dump`."""
        self._entries = msgspec.convert(data, dict[str, JournalEntry])

    def _change(self, candidate: str, **changes: object) -> None:
        self._entries[candidate] = msgspec.structs.replace(self[candidate], **changes)


def compared(
    report: GateReport,
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    *,
    tasks: Sequence[int],
    within: Range,
) -> GateReport:
    """Return the report with the numbers that rewards by task give; without them where no task is known for both."""
    common = [task for task in tasks if task in ours and task in theirs]
    if not common:
        return report
    return msgspec.structs.replace(
        report,
        score=fmean(ours[task] for task in common),
        rival_score=fmean(theirs[task] for task in common),
        gain=estimate([ours[task] - theirs[task] for task in common], within.of_differences),
    )
