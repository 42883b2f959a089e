"""Notices that an algorithm's steps teach nothing, and says what to change."""

from collections.abc import Callable
from statistics import fmean

from agl.contracts import StepReport

SHARE = "silent_share"
"""Metric of a step: the share of its rollouts without a gradient."""

STEPS = 3
"""Steps in a row after which silence is told."""

LOUDEST = 0.9
"""Least silent share of such a step."""


class SilenceWatch:
    """Watches the steps of one algorithm; tells once for each time that they fall silent.

    Args:
        say: Shows one paragraph.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._silent: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        """Note a finished step; algorithms that do not report silence are not watched."""
        if report.metrics.get(SHARE, 0.0) < LOUDEST:
            self._silent.clear()
            return
        self._silent.append(report)
        if len(self._silent) == STEPS:
            self._say(_paragraph(self._silent))


def _paragraph(steps: list[StepReport]) -> str:
    share = fmean(step.metrics[SHARE] for step in steps)
    rewards = [step.metrics["reward"] for step in steps if "reward" in step.metrics]
    mean = f" ({fmean(rewards):.3f} on average)" if rewards else ""
    return (
        f"{share:.0%} of the rollouts of the last {STEPS} steps taught nothing, because the rollouts of a task got the "
        f"same reward{mean}. If that is low, warm the policy up with 'sft' or 'rft', take easier tasks, or give reward "
        "for a part of the way; a larger group_size makes a difference more likely. If it is as high as it gets, these "
        "tasks are learned: stop here, or take harder ones. If only some tasks teach something, refill replaces the "
        'others, and curriculum = "frontier" draws fewer of them'
    )
