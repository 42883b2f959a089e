"""Compares the newest validations of runs by the gate.

Runs that were validated on the same tasks are compared task by task, others in the order of their tasks. The newest
validation is compared and not the best one, which is the luckiest of several. The comparisons share one error: of any
number of runs that are as good as the first, at least one is called better or worse with a probability of at most 5 %.
"""

from collections.abc import Sequence

from agl.contracts import ExperimentRecord, Store
from agl.schemas import Record
from agl_inspect.records.validations import Validation, read_validations
from agl_inspect.statistics import Comparison, compare, compare_tasks

_ERROR = 0.05
"""The largest probability of a wrong verdict among all comparisons with the first run."""


class RunDifference(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The comparison of one run's newest validation with another's.

    Attributes:
        run: The name of the experiment that is compared.
        baseline: The name of the experiment that ``run`` is compared with.
        comparison: The rewards of ``run`` against those of ``baseline``; ``None`` if either has no validation.
        words: The whole result in a sentence.
    """

    run: str
    baseline: str
    comparison: Comparison | None
    words: str


async def compare_runs(store: Store, records: Sequence[ExperimentRecord]) -> list[RunDifference]:
    """Compare the newest run of the first experiment with the newest run of each other one."""
    newest = [(record.name, await _newest(store, record)) for record in records]
    error = _ERROR / 2 / max(1, len(newest) - 1)  # of each direction
    return [_difference(first, other, error=error) for first in newest[:1] for other in newest[1:]]


async def _newest(store: Store, record: ExperimentRecord) -> Validation | None:
    found = await read_validations(store, record.name, record.run)
    return found[-1] if found else None


_Named = tuple[str, Validation | None]


def _difference(first: _Named, other: _Named, *, error: float) -> RunDifference:
    (baseline, old), (run, new) = first, other
    unclear = f"Not enough validations to tell whether {run} is better than {baseline}"
    if old is None or new is None:
        missing = " and ".join(name for name, one in (first, other) if one is None)
        words = f"{unclear}: no validation of {missing} is recorded"
        return RunDifference(run=run, baseline=baseline, comparison=None, words=words)
    if old.tasks == new.tasks:
        samples = [{str(task): [reward] for task, reward in enumerate(one.rewards)} for one in (old, new)]
        found, note = compare_tasks(*samples, error=error), ""
    else:
        found, note = compare(old.rewards, new.rewards, error=error), "; the validation tasks differ"
    lead = unclear if found.verdict == "undecidable" else f"{run} is {found.verdict} than {baseline}"
    words = f"{lead}: its newest validation has {new.mean:.3f} against {old.mean:.3f}, {found.facts}{note}"
    return RunDifference(run=run, baseline=baseline, comparison=found, words=words)
