"""Computes the gates of a candidate from its recorded observations, the same way for a learner and for a reader.

Every gate is a function of the settings in :class:`GateRules` and of the observations in their order, so a decision can
be computed again from the store to the last digit.
"""

from collections.abc import Sequence
from statistics import fmean

from agl.acceptance import Gate, error_for
from agl_inspect.records.learning import Decision, GateRules, LearningCandidate, ReplayPair, ServedUnit

REGRESSION = "regression"
"""The kind of the tasks that every candidate has to solve as well as the versions before it."""

SUSPICION_BUDGET = 100
"""Units after which a suspicion ends: with a rollback if the versions before seem to be better."""


def replay_gates(rules: GateRules, *, number: int, pairs: Sequence[ReplayPair]) -> dict[str, Gate]:
    """Return the gates of a replay by name: ``replay``, ``control``, ``regression`` and one for each kind.

    Args:
        number: The position of the candidate among all that spent a part of the error.
        pairs: The pairs so far. A gate reads no pair after its verdict.
    """
    gates = {"replay": Gate(error=error_for(number, error=rules.error), gain=rules.gain, budget=rules.tasks or None)}
    for pair in pairs:
        add_pair(gates, pair, rules)
    return gates


def add_pair(gates: dict[str, Gate], pair: ReplayPair, rules: GateRules) -> None:
    """Feed a pair to the gates of a replay."""
    is_regression = pair.kind == REGRESSION
    if not is_regression:
        _feed(gates["replay"], pair.old, pair.new)
    if pair.control is not None:
        control = gates.setdefault("control", Gate(error=rules.error / 2))
        if control.verdict == "open":
            control.update(pair.old, pair.control)
    for kind, (old, new) in (pair.kinds or {pair.kind: (pair.old, pair.new)}).items():
        if kind:
            name = REGRESSION if is_regression else f"kind-{kind}"
            _feed(gates.setdefault(name, Gate(error=rules.error)), old, new)


def mean_pair(pairs: Sequence[ReplayPair]) -> ReplayPair:
    """Return the pair of one unit, whose rewards are the means over its replayed conversations."""
    controls = [pair.control for pair in pairs if pair.control is not None]
    same_kind: dict[str, list[ReplayPair]] = {}
    for pair in pairs:
        same_kind.setdefault(pair.kind, []).append(pair)
    return ReplayPair(
        unit=pairs[0].unit,
        kind=", ".join(sorted(filter(None, same_kind))),
        kinds={
            kind: (fmean(pair.old for pair in own), fmean(pair.new for pair in own)) for kind, own in same_kind.items()
        },
        old=fmean(pair.old for pair in pairs),
        new=fmean(pair.new for pair in pairs),
        control=fmean(controls) if len(controls) == len(pairs) else None,
        rollouts=[rollout for pair in pairs for rollout in pair.rollouts],
    )


def _feed(gate: Gate, old: float, new: float) -> None:
    if gate.verdict == "open":
        gate.update(old, new)


def served_gates(rules: GateRules, stage: str, units: Sequence[ServedUnit]) -> dict[str, Gate]:
    """Return the gates of a stage that serves a candidate: ``canary`` with its guards, ``watch`` or ``suspicion``.

    ``units`` are the units since the stage began.
    """
    gates = {stage: Gate(error=rules.error, budget=SUSPICION_BUDGET if stage == "suspicion" else None)}
    if stage == "canary":
        gates |= {f"guard-{name}": Gate(error=rules.error) for name in rules.guard}
    for unit in units:
        add_unit(gates, unit)
    return gates


def add_unit(gates: dict[str, Gate], unit: ServedUnit) -> None:
    """Feed a unit to the gates of a stage; they go on after the verdict ``better``, because harm may begin later."""
    for name, gate in gates.items():
        guard = name.removeprefix("guard-")
        value = unit.guards.get(guard) if guard != name else unit.reward
        if value is not None:
            gate.arrive(value, is_new=unit.is_new, share=unit.share, stratum=unit.kind)


def shows_harm(gate: Gate) -> bool:
    """Return true if a gate has proven harm, whatever its first verdict was."""
    return gate.evidence_of_harm >= 1 / gate.error


def first_unit(candidate: LearningCandidate) -> int:
    """Return the number of the first unit of the candidate's present stage."""
    first = candidate.moves[-1].first
    for move in reversed(candidate.moves):
        if move.stage != candidate.stage:
            break
        first = move.first
    return first


def computed_again(
    decision: Decision, candidate: LearningCandidate, pairs: Sequence[ReplayPair], units: Sequence[ServedUnit]
) -> Gate:
    """Return the gate of a decision, computed from the observations that it names."""
    seen = slice(decision.first, decision.end)
    if decision.stage == "replay":
        return replay_gates(candidate.rules, number=candidate.number, pairs=pairs[seen])[decision.gate]
    return served_gates(candidate.rules, decision.stage, units[seen])[decision.gate]


def decision_of(candidate: LearningCandidate, name: str, gate: Gate, *, first: int, end: int, at: float) -> Decision:
    """Return the record of what a gate says after the observations from number ``first`` to before ``end``."""
    return Decision(
        id=f"{candidate.id}-{name}" if not first else f"{candidate.id}-{name}-{first}",
        candidate=candidate.id,
        stage=candidate.stage,
        gate=name,
        verdict=gate.verdict,
        evidence=gate.evidence,
        evidence_of_harm=gate.evidence_of_harm,
        error=gate.error,
        gain=gate.gain,
        first=first,
        end=end,
        count=gate.count,
        mean=gate.mean,
        lower=gate.lower,
        upper=gate.upper,
        needed=gate.needed,
        at=at,
    )
