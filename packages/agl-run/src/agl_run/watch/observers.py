"""The contract of everything that watches a run: a driver calls each observer in the order of one list.

Observers report and measure; none of them decides how training goes on. Those that find that it cannot raise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agl.algorithms import AlgorithmConfig
from agl.contracts import CallUse, Recording, StepReport
from agl.schemas import Episode, Mode
from agl_inspect.rollouts.step_tallies import Observed


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rollouts that an algorithm, or another part of the run, collected together.

    Attributes:
        caller: The algorithm's name, or that of the other part.
        episodes: All of them.
        algorithm: The algorithm's configuration, if it is one.
        step: The step for which they ran.
        mode: Their mode.
        trains: True if the algorithm trains on them.
        kept: The episodes on which it trains, with the rewards that count.
        observed: Seconds, tokens and errors of their calls.
        is_own: False for rollouts that another algorithm collected, and that were watched there already.
        slot_s: Seconds that the slots of this process offered meanwhile, all together.
        taken_s: Seconds of these that agents ran.
    """

    caller: str
    episodes: Sequence[Episode]
    algorithm: AlgorithmConfig | None = None
    step: int = 0
    mode: Mode = "train"
    trains: bool = False
    kept: Sequence[Episode] = ()
    observed: Observed | None = None
    is_own: bool = True
    slot_s: float = 0.0
    taken_s: float = 0.0


class Observer:
    """Watches a run; each method does nothing unless an observer has its own."""

    def rollout(self, caller: str, recording: Recording) -> None:
        """See a finished rollout of ``caller`` with its spans, as soon as it is read."""

    def batch(self, batch: Batch) -> None:
        """See all rollouts of one request; raises what keeps the run from going on."""

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Return what the rollouts of a step add to its metrics; called before the step is saved.

        Args:
            caller: The algorithm, or the other part of the run.
            step: Its step.
            uses: The use that the step made of each call, by rollout.
        """
        return {}

    async def step(self, report: StepReport, *, algorithm: str) -> None:
        """See a step that is logged, with all its metrics."""

    def end(self) -> None:
        """Report on the whole run; raises what makes it a failure."""
