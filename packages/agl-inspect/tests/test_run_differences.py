"""The newest validation of each run is compared with that of the first run, task by task if they share their tasks."""

import asyncio
from collections.abc import Sequence

import msgspec

from agl.contracts import ExperimentRecord
from agl.stores import MemoryStore
from agl_inspect.advice.run_differences import RunDifference, compare_runs
from agl_inspect.records.state import run_key
from agl_inspect.records.validations import Validation, Validations, digest_of

ZEROS, ONES = (0.0,) * 12, (1.0,) * 12


def compared(*validations: Sequence[Validation]) -> list[RunDifference]:
    """Compare runs; each argument holds the validations of one run, first to last."""

    async def compare() -> list[RunDifference]:
        store = MemoryStore()
        records = [ExperimentRecord(name="abcd"[place]) for place in range(len(validations))]
        for record, found in zip(records, validations, strict=True):
            for one in found:
                key = run_key(record.name, record.run, f"validation/{one.turn:08d}")
                await store.save_state({key: msgspec.json.encode(one)})
        return await compare_runs(store, records)

    return asyncio.run(compare())


def verdict_of(*found: RunDifference) -> list[str]:
    return [each.comparison.verdict for each in found if each.comparison is not None]


def one(rewards: Sequence[float], *, turn: int = 1, tasks: str = "t") -> Validation:
    return Validation(turn=turn, versions={}, rewards=tuple(rewards), tasks=tasks)


def test_runs_on_the_same_tasks_are_compared_task_by_task() -> None:
    better, worse = compared([one([*ZEROS, *ONES])], [one([*ONES, *ONES])], [one([*ZEROS, *ZEROS])])
    assert ("b", "a", "better", 24) == (
        better.run,
        better.baseline,
        *verdict_of(better),
        better.comparison.paired_tasks,
    )
    assert better.words.startswith("b is better than a: its newest validation has 1.000 against 0.500, difference")
    assert worse.words.startswith("c is worse than a: its newest validation has 0.000 against 0.500, difference")


def test_runs_on_different_tasks_are_compared_in_their_order() -> None:
    (found,) = compared([one(ZEROS)], [one([*ONES, *ONES], tasks="others")])
    assert ("better", 0, 12) == (*verdict_of(found), found.comparison.paired_tasks, found.comparison.pairs)
    assert found.words.endswith("12 and 12 rollouts; the validation tasks differ")


def test_newest_validation_counts_and_not_the_luckiest() -> None:
    (found,) = compared([one(ONES)], [one(ONES, turn=1), one(ZEROS, turn=2)])
    assert ["worse"] == verdict_of(found)


def test_comparisons_with_the_first_run_share_their_error() -> None:
    few = one(ONES[:9])
    (alone,) = compared([one(ZEROS[:9])], [few])
    several = compared([one(ZEROS[:9])], [few], [few], [few])
    assert ["better"] == verdict_of(alone)
    assert ["undecidable"] * 3 == verdict_of(*several)
    assert several[0].words.startswith("Not enough validations to tell whether b is better than a: its newest")
    assert several[0].words.endswith("tasks would do")


def test_run_without_a_validation_cannot_be_compared() -> None:
    (found,) = compared([one(ONES)], [])
    words = "Not enough validations to tell whether b is better than a: no validation of b is recorded"
    assert (None, words) == (found.comparison, found.words)


def test_one_earlier_large_loss_does_not_hide_a_fall() -> None:
    async def odds() -> float:
        store, tasks = MemoryStore(), list(range(30))
        for at in (one([-10.0, *[0.0] * 29]), one([1.0] * 30, turn=2), one([0.0] * 30, turn=3)):
            key = run_key("a", 1, f"validation/{at.turn:08d}")
            await store.save_state({key: msgspec.json.encode(msgspec.structs.replace(at, tasks=digest_of(tasks)))})
        found = Validations(store, name="a", run=1, tasks=tasks, train=(), agent="", tuned=frozenset())
        await found.load()
        last = found.at(3)
        assert last is not None
        return found.evidence_of_fall(last)

    assert asyncio.run(odds()) > 1e6
