"""The views of learning while serving: the learners of a store, the candidates of one, and the story of a candidate."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from agl.acceptance import Gate, error_for
from agl.contracts import Store
from agl.errors import NotFoundError
from agl.schemas import Record
from agl_console.figures import POINTS, Figure, line_of
from agl_console.versions import DiffLine, NoFilter, difference
from agl_inspect.learning import REGRESSION, add_pair, add_unit, computed_again, replay_gates, served_gates
from agl_inspect.records.learning import (
    Decision,
    LearnerControl,
    LearnerState,
    LearningCandidate,
    LearningRecords,
    Move,
    ReplayPair,
    ServedUnit,
    learners,
)

T = TypeVar("T")

PAGE = 50
"""The most candidates on a page."""

SHOWN = 12
"""The most replayed pairs, and the most served users, on a page."""

LEAST = -3.0
"""The lowest evidence that is drawn, as a power of ten."""


class LearnerFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page: the number of the oldest candidate on the previous page."""

    before: int = 0


class LearnerRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A learner, and how far it is.

    Attributes:
        current: The candidate on trial; ``""`` without one.
        watched: The promoted candidate that is compared with the versions before; ``""`` without one.
        error: The largest probability that the learner ever promotes a candidate that is no better; 0 if unknown.
        error_spent: The part of it that the candidates so far have spent.
        is_learning: Whether a round of training runs.
    """

    name: str
    rated: int
    rounds: int
    candidates: int
    current: str
    watched: str
    error: float
    error_spent: float
    is_paused: bool
    is_learning: bool


class LearnersView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """All learners that have worked on the store, by name."""

    learners: list[LearnerRow]


class LearnerView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A learner with a page of its candidates, the newest first.

    Attributes:
        excluded: Users whose feedback does not count, with the reason.
        next: The query of the page with older candidates; empty on the last.
    """

    learner: LearnerRow
    excluded: dict[str, str]
    candidates: list[LearningCandidate]
    next: dict[str, str]


class Change(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The change that a candidate makes to one resource.

    Attributes:
        diff: The difference of the texts; empty if ``is_too_long``, ``None`` if one of them is not in the store.
    """

    name: str
    old: str
    new: str
    diff: list[DiffLine] | None
    is_too_long: bool


class Verdict(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A decision of a gate, with its words."""

    decision: Decision
    words: str


class Exposure(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The traffic that got some versions while a candidate was served.

    Attributes:
        users: The number of users, or of conversations without a user.
        reward: The mean of the users' mean rewards; ``None`` without any.
    """

    users: int
    conversations: int
    reward: float | None


class CandidateView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The story of a candidate.

    Attributes:
        figures: The evidence in each stage over its observations, and the share of the traffic over time.
        new: The traffic that got the candidate.
        old: The traffic that got the versions before, in the same time.
        pairs: Replayed conversations, those whose rewards differ most first.
        units: The newest users in the record.
    """

    learner: str
    candidate: LearningCandidate
    changes: list[Change]
    figures: list[Figure]
    verdicts: list[Verdict]
    new: Exposure
    old: Exposure
    pairs: list[ReplayPair]
    units: list[ServedUnit]


async def learners_view(store: Store, chosen: NoFilter) -> LearnersView:
    """Read all learners of a store."""
    rows = [await _row(store, name) for name in await learners(store)]
    return LearnersView(learners=[row for row, _, _ in rows])


async def learner_view(store: Store, name: str, chosen: LearnerFilter) -> LearnerView:
    """Read a learner and a page of its candidates; raises :class:`NotFoundError` for an unknown learner."""
    row, state, candidates = await _row(store, name)
    newest = sorted(candidates, key=lambda each: each.number, reverse=True)
    behind = [each for each in newest if not chosen.before or each.number < chosen.before]
    page = behind[:PAGE]
    return LearnerView(
        learner=row,
        excluded=state.excluded,
        candidates=page,
        next={"before": str(page[-1].number)} if len(behind) > PAGE else {},
    )


async def _row(store: Store, name: str) -> tuple[LearnerRow, LearnerState, list[LearningCandidate]]:
    records = LearningRecords(name)
    state = await records.state.get(store)
    if state is None:
        raise NotFoundError("learner", name, "agl console --json /learners lists those of the store")
    control = await records.control.get(store) or LearnerControl()
    candidates = list((await records.candidates.read(store)).values())
    row = LearnerRow(
        name=name,
        rated=state.rated,
        rounds=state.rounds,
        candidates=state.candidates,
        current=state.current,
        watched=state.watched,
        error=max((each.rules.error for each in candidates), default=0.0),
        error_spent=sum(error_for(each.number, error=each.rules.error) for each in candidates),
        is_paused=control.is_paused,
        is_learning=state.is_learning,
    )
    return row, state, candidates


async def candidate_view(store: Store, name: str, identity: str, chosen: NoFilter) -> CandidateView:
    """Read the story of a candidate; raises :class:`NotFoundError` for an unknown one."""
    records = LearningRecords(name)
    candidate = await records.candidates.get(store, identity)
    if candidate is None:
        raise NotFoundError("candidate", identity, f"/learners/{name} lists all")
    pairs = list((await records.pairs(identity).read(store)).values())
    units = list((await records.units(identity).read(store)).values())
    decisions = [each for each in (await records.decisions.read(store)).values() if each.candidate == identity]
    decisions.sort(key=lambda each: each.at)
    return CandidateView(
        learner=name,
        candidate=candidate,
        changes=[await _change(store, candidate, resource) for resource in candidate.versions],
        figures=[*_evidence_figures(candidate, pairs, units), *_share_figures(candidate)],
        verdicts=[
            Verdict(decision=each, words=computed_again(each, candidate, pairs, units).words) for each in decisions
        ],
        new=_exposure([unit for unit in units if unit.is_new]),
        old=_exposure([unit for unit in units if not unit.is_new]),
        pairs=sorted(pairs, key=lambda pair: -abs(pair.new - pair.old))[:SHOWN],
        units=units[-SHOWN:][::-1],
    )


async def _change(store: Store, candidate: LearningCandidate, name: str) -> Change:
    old, new = candidate.baseline[name], candidate.versions[name]
    try:
        is_too_long, diff = difference(await store.resource(name, old), await store.resource(name, new))
    except NotFoundError:
        is_too_long, diff = False, None
    return Change(name=name, old=old, new=new, diff=diff, is_too_long=is_too_long)


def _exposure(units: Sequence[ServedUnit]) -> Exposure:
    return Exposure(
        users=len(units),
        conversations=sum(len(unit.rollouts) for unit in units),
        reward=sum(unit.reward for unit in units) / len(units) if units else None,
    )


def _evidence_figures(
    candidate: LearningCandidate, pairs: Sequence[ReplayPair], units: Sequence[ServedUnit]
) -> list[Figure]:
    """Return a figure of the evidence for each stage with observations, in the order of the stages."""
    rules = candidate.rules
    gates = replay_gates(rules, number=candidate.number, pairs=())
    asked = [pair for pair in pairs if pair.kind != REGRESSION]
    found = [_evidence(candidate.id, "replay", gates["replay"], asked, partial(add_pair, gates, rules=rules))]
    starts = _served_stages(candidate.moves)
    ends = [*(first for _, first in starts[1:]), len(units)]
    for (stage, first), end in zip(starts, ends, strict=False):
        gates = served_gates(rules, stage, ())
        found.append(_evidence(candidate.id, stage, gates[stage], units[first:end], partial(add_unit, gates)))
    return [figure for figure in found if figure.series]


def _served_stages(moves: Sequence[Move]) -> list[tuple[str, int]]:
    """Return each stage with traffic, and the number of its first unit; a stage with several shares is one."""
    found: list[tuple[str, int]] = []
    before = ""
    for move in moves:
        if move.stage in ("canary", "watch", "suspicion") and move.stage != before:
            found.append((move.stage, move.first))
        before = move.stage
    return found


def _evidence(candidate: str, stage: str, gate: Gate, observed: Sequence[T], add: Callable[[T], None]) -> Figure:
    """Return the odds for and against a candidate after each observation, as powers of ten.

    ``add`` feeds an observation to the gate.
    """
    odds: list[tuple[int, float, float]] = []
    for place, each in enumerate(observed, start=1):
        add(each)
        odds.append((place, _power(gate.evidence), _power(gate.evidence_of_harm)))
    needed = _power(1 / gate.error)
    values = {
        "better": [(place, place, better) for place, better, _ in odds],
        "worse": [(place, place, worse) for place, _, worse in odds],
        "needed": [(place, place, needed) for place, _, _ in odds],
    }
    lines = [line_of(candidate, name, points) for name, points in values.items() if points]
    over = "pair" if stage == "replay" else "user"
    return Figure(name=f"evidence in {stage}", series=lines, is_thinned=len(odds) > POINTS, over=over)


def _power(odds: float) -> float:
    return max(LEAST, math.log10(odds)) if odds > 0 else LEAST


def _share_figures(candidate: LearningCandidate) -> list[Figure]:
    """Return the figure of the candidate's share of the traffic, with a point before and at each change."""
    points: dict[int, float] = {}
    share = 0.0
    for move in candidate.moves:
        second = max(0, round(move.at - candidate.created_at))
        points.setdefault(second - 1, share)
        points[second] = share = move.share
    places = sorted(place for place in points if place >= 0)
    if not any(points.values()):
        return []
    line = line_of(candidate.id, "share", [(place, place, points[place]) for place in places])
    return [Figure(name="share of the traffic", series=[line], over="second")]
