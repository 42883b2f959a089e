"""Rewards that were paid for, by candidate, split, task and repeat."""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Literal

import msgspec

from agl.schemas import Json, Record
from agl_algo_apo.measurement.faults import Status

Split = Literal["train", "val", "test"]
"""Training tasks; validation tasks of the search; and test tasks, which are validation tasks held back.

The position of a test task is its position among all validation tasks.
"""

FRESH = 1
"""The ``repeat`` number of the final measurement's rollouts on validation tasks.

On validation tasks 0 is the first measurement, and further ones begin with 2. Rollouts on test tasks have the repeats
0, 1, 2 and so on; all of them count, because test tasks select nothing.
"""


class Measured(Record, frozen=True, kw_only=True):
    """The outcome of one rollout.

    Attributes:
        reward: The score; the failure reward if the agent failed.
        rollout: The rollout's id.
        status: How the rollout ended.
        feedback: The feedback of the rollout's rewards, and its error, as text.
    """

    reward: float
    rollout: str
    status: Status = "ok"
    feedback: str = ""


class Scores:
    """Remembers the rewards that were paid for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[tuple[int, int], Measured]] = {}

    def __len__(self) -> int:
        return sum(len(known) for known in self._known.values())

    def get(self, candidate: str, split: Split, task: int, repeat: int = 0) -> Measured | None:
        """Return the outcome of one rollout; ``None`` if it was not measured."""
        return self._known.get((candidate, split), {}).get((task, repeat))

    def put(self, candidate: str, split: Split, task: int, repeat: int, measured: Measured) -> None:
        """Store the outcome of one rollout."""
        self._known.setdefault((candidate, split), {})[(task, repeat)] = measured

    def rewards(self, candidate: str, split: Split, tasks: Iterable[int] | None = None) -> dict[int, float]:
        """Return a candidate's known rewards by task, for ``tasks`` or for all; tasks without a reward are absent.

        If a task was measured several times, its reward is the mean. :data:`FRESH` rewards of validation tasks are left
        out, because they must not influence any choice.
        """
        wanted = None if tasks is None else set(tasks)
        found: dict[int, list[float]] = {}
        for (task, repeat), measured in self._known.get((candidate, split), {}).items():
            is_fresh = split == "val" and repeat == FRESH
            if not is_fresh and (wanted is None or task in wanted):
                found.setdefault(task, []).append(measured.reward)
        # One number per task, however often it ran: intervals and races count tasks, not rollouts.
        return {task: fmean(values) for task, values in found.items()}

    def fresh(self, candidate: str) -> dict[int, float]:
        """Return the rewards of the final measurement on validation tasks, by task."""
        known = self._known.get((candidate, "val"), {})
        return {task: measured.reward for (task, repeat), measured in known.items() if repeat == FRESH}

    def every(self, candidate: str, split: Split) -> dict[int, float]:
        """Return a candidate's rewards by task; if a validation task also has a fresh reward, the mean of the two."""
        first, fresh = self.rewards(candidate, split), self.fresh(candidate) if split == "val" else {}
        return {t: fmean(r[t] for r in (first, fresh) if t in r) for t in sorted(first.keys() | fresh.keys())}

    def next_repeat(self, candidate: str) -> int:
        """Return a ``repeat`` number that is not used yet, to measure a candidate again on validation tasks."""
        return max([FRESH, *(repeat for _, repeat in self._known.get((candidate, "val"), {}))]) + 1

    def keep_fresh(self) -> None:
        """Turn the final measurement's rewards into ordinary ones, because a search that continues chooses by them."""
        for known in [known for (_, split), known in self._known.items() if split == "val"]:
            repeat = 1 + max(repeat for _, repeat in known)
            for task in [task for task, old in known if old == FRESH]:
                known[(task, repeat)] = known.pop((task, FRESH))

    def floor(self) -> float:
        """Return the worst reward measured so far; 0 if there is none."""
        return min(self._all(), default=0.0)

    def ceiling(self) -> float:
        """Return the best reward measured so far; minus infinity if there is none."""
        return max(self._all(), default=-math.inf)

    def clear(self) -> None:
        """Forget all outcomes, because resources that affect the rewards have changed."""
        self._known.clear()

    def dump(self) -> Json:
        """Return all outcomes as JSON, one row per measurement."""
        return [
            [*place, *key, msgspec.to_builtins(measured)]
            for place, known in self._known.items()
            for key, measured in known.items()
        ]

    def load(self, data: Json) -> None:
        """Restore the outcomes from :meth:`dump`."""
        self._known = {}
        for row in msgspec.convert(data, list[tuple[str, Split, int, int, Measured]]):
            self.put(*row)

    def any(self) -> Measured | None:
        """Return one of the outcomes; ``None`` if there are none."""
        return next((measured for known in self._known.values() for measured in known.values()), None)

    def _all(self) -> Iterable[float]:
        return (measured.reward for known in self._known.values() for measured in known.values())
