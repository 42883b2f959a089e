"""Finds, while an algorithm trains, what keeps it from learning."""

from typing import TYPE_CHECKING

from agl.contracts import StepReport
from agl_inspect.advice import Suggestion, suggestions_for

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST, _LAST = 10, 50
"""Steps at the start and at the end that are kept; the rules compare these."""

_SPEEDS = ("slow-rollouts", "slow-updates")
"""Rules that are about the time of a step and not about learning; ``agl metrics --suggest`` has them."""


class StepWatch:
    """Watches the steps of one algorithm by the rules of ``agl metrics --suggest``.

    Args:
        algorithm: Its name.
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._steps: dict[int, Mapping[str, float]] = {}
        self._told: set[str] = set(_SPEEDS)

    def add(self, report: StepReport) -> list[Suggestion]:
        """Look at the steps so far, of which this one is the newest; returns what a rule finds for the first time."""
        self._steps[report.step] = report.metrics
        numbers = list(self._steps)
        for number in numbers[_FIRST:-_LAST]:
            del self._steps[number]
        every = suggestions_for(self._algorithm, self._steps, validations={})
        new = [found for found in every if found.rule not in self._told]
        self._told.update(found.rule for found in new)
        return new
