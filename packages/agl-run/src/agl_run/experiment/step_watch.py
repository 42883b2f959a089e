"""Tells, while an algorithm trains, what keeps it from learning."""

from collections.abc import Callable, Mapping

from agl.contracts import StepReport
from agl_run.suggestions import suggestions_for

_FIRST, _LAST = 10, 50
"""Steps at the start and at the end that are kept; the rules compare these."""

_SPEEDS = ("slow-rollouts", "slow-updates")
"""Rules that are about the time of a step and not about learning; ``agl suggest`` has them."""


class StepWatch:
    """Watches the steps of one algorithm by the rules of ``agl suggest``, and tells once what each rule finds.

    Args:
        say: Shows one line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._steps: dict[int, Mapping[str, float]] = {}
        self._told: set[str] = set(_SPEEDS)

    def add(self, report: StepReport) -> None:
        """Look at the steps so far, of which this one is the newest."""
        self._steps[report.step] = report.metrics
        numbers = list(self._steps)
        for number in numbers[_FIRST:-_LAST]:
            del self._steps[number]
        for found in suggestions_for("", self._steps, validations={}):
            if found.rule not in self._told:
                self._told.add(found.rule)
                self._say(f"{found.evidence}. To change that: {found.change}")
