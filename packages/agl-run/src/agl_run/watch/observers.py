"""The contract of observers: objects that watch a run, and that a driver calls in a fixed order.

Observers report and measure. They do not decide how training goes on, but an observer can end the run by raising.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agl.algorithms import AlgorithmConfig
from agl.contracts import CallUse, Recording, StepReport
from agl.schemas import Episode, Mode
from agl_inspect.rollouts.step_tallies import Observed


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rollouts that one caller, an algorithm or another part of the run, collected together.

    Attributes:
        caller: The name of the algorithm or other part.
        episodes: The episodes of all rollouts.
        algorithm: The algorithm's configuration; ``None`` if the caller is not an algorithm.
        step: The step for which the rollouts ran.
        mode: The mode of the rollouts.
        trains: True if the algorithm trains on the rollouts.
        kept: The episodes on which the algorithm trains, with the rewards that count.
        observed: Seconds, tokens and errors of the rollouts' calls.
        is_own: False for rollouts that another algorithm collected, and that observers have already seen there.
        slot_s: Time that all slots of this process offered during the collection, in slot-seconds.
        taken_s: The part of ``slot_s`` in which agents ran.
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
    """The base class of observers, whose methods do nothing; an observer overrides the methods that it needs."""

    def rollout(self, caller: str, recording: Recording) -> None:
        """Called with each finished rollout of ``caller`` and its spans, as soon as they are read."""

    def batch(self, batch: Batch) -> None:
        """Called with all rollouts of one request; may raise to end the run."""

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Return metrics about the rollouts of a step; called before the step is saved.

        Args:
            caller: The algorithm, or another part of the run.
            step: The caller's step.
            uses: How the step used each call, by rollout.
        """
        return {}

    async def step(self, report: StepReport, *, algorithm: str) -> None:
        """Called after a step is logged, with all its metrics."""

    def end(self) -> None:
        """Called at the end of the run to report on it; may raise to make the run a failure."""
