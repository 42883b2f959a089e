"""Compares the newest validations of runs by the gate: the difference of their rewards, with bounds.

Runs that were validated on the same tasks are compared task by task, others in the order of their tasks. The newest
validation is compared and not the best one, which is the luckiest of several. The error is not divided among the runs:
of twenty equally good runs, about one differs from the first by chance.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from agl.contracts import ExperimentRecord, Store
from agl.schemas import Record
from agl_inspect.records.validations import Validation, read_validations
from agl_inspect.statistics import compare, compare_tasks

Verdict = Literal["better", "worse", "unclear"]
"""The outcome of a comparison."""


class RunDifference(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The comparison of one run's newest validation with another's.

    Attributes:
        run: The name of the experiment that is compared.
        baseline: The name of the experiment that ``run`` is compared with.
        difference: Mean reward of ``run`` minus that of ``baseline``; ``None`` if there are too few rewards.
        low: Lower end of the 95 % interval of ``difference``; ``None`` if there are too few rewards.
        high: Upper end of the 95 % interval of ``difference``; ``None`` if there are too few rewards.
        tasks: Number of validation tasks of ``run``.
        baseline_tasks: Number of validation tasks of ``baseline``.
        is_paired: Whether both have the same tasks, so that the rewards were paired by task.
        verdict: ``better`` or ``worse`` if the interval excludes 0, else ``unclear``.
        words: The whole result in a sentence.
    """

    run: str
    baseline: str
    difference: float | None
    low: float | None
    high: float | None
    tasks: int
    baseline_tasks: int
    is_paired: bool
    verdict: Verdict
    words: str


async def compare_runs(store: Store, records: Sequence[ExperimentRecord]) -> list[RunDifference]:
    """Compare the newest run of the first experiment with the newest run of each other one."""
    newest = [(record.name, await _newest(store, record)) for record in records]
    return [_difference(first, other) for first in newest[:1] for other in newest[1:]]


async def _newest(store: Store, record: ExperimentRecord) -> Validation | None:
    found = await read_validations(store, record.name, record.run)
    return found[-1] if found else None


_Named = tuple[str, Validation | None]


def _difference(first: _Named, other: _Named) -> RunDifference:
    (baseline, old), (run, new) = first, other
    unclear = RunDifference(
        run=run,
        baseline=baseline,
        difference=None,
        low=None,
        high=None,
        tasks=_count(other),
        baseline_tasks=_count(first),
        is_paired=False,
        verdict="unclear",
        words=f"{run} cannot be compared with {baseline}: ",
    )
    if old is None or new is None:
        return replace(unclear, words=f"{unclear.words}{baseline if old is None else run} has no validation")
    fewest = min(first, other, key=_count)
    if _count(fewest) < 2:
        few = f"{fewest[0]} has {_tasks(_count(fewest))}, and an interval needs 2"
        return replace(unclear, words=unclear.words + few)
    is_paired = old.tasks == new.tasks and len(old.rewards) == len(new.rewards)
    if is_paired:
        samples = [{str(task): [reward] for task, reward in enumerate(one.rewards)} for one in (old, new)]
        found = compare_tasks(*samples)
    else:
        found = compare(old.rewards, new.rewards)
    difference, low, high = found.difference, found.low, found.high
    is_clear = found.verdict != "undecidable"
    verdict: Verdict = "unclear" if found.verdict == "undecidable" else found.verdict
    head = f"{run} is {verdict} than {baseline} by {abs(difference):.3g}"
    ends = (low, high) if difference > 0 or not is_clear else (-high, -low)
    if not is_clear:
        head = f"{run} is not shown to be better or worse than {baseline}: the difference is {difference:+.3g}"
    how = (
        f"paired by {_tasks(len(new.rewards))}"
        if is_paired
        else f"not paired, because the validation tasks differ: {len(new.rewards)} against {len(old.rewards)}"
    )
    words = f"{head}, 95 % interval {ends[0]:.3g} to {ends[1]:.3g}, {how}"
    known = replace(unclear, difference=difference, low=low, high=high)
    return replace(known, is_paired=is_paired, verdict=verdict, words=words)


def _count(named: _Named) -> int:
    return len(named[1].rewards) if named[1] else 0


def _tasks(count: int) -> str:
    return f"{count} validation task{'' if count == 1 else 's'}"
