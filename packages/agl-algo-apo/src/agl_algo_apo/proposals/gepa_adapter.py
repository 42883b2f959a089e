"""Presents an experiment to the gepa library: as its adapter, its reflection model and its stopper.

The library is synchronous and runs in a separate thread; all work here that pays or waits is passed to the event loop.
Nothing here reads a wall clock or draws a random number. So a phase that is repeated after a crash makes the same
requests under the same names, finds the rollouts and answers that were paid for, and continues where it was
interrupted.

The adapter accepts arguments that later releases of the library add to its calls. It depends on two methods of the
library's adapter protocol, on the attribute ``propose_new_texts``, on ``EvaluationBatch``, and on the library calling
stoppers between iterations.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from gepa.core.adapter import EvaluationBatch

from agl.errors import RunError
from agl_algo_apo.measurement.scores import Measured, Split
from agl_algo_apo.proposals.optimizer import OptimizerDownError
from agl_algo_apo.search.budget import BudgetExhaustedError
from agl_algo_apo.search.progress import StopReason

if TYPE_CHECKING:
    from concurrent.futures import Future

    from agl_algo_apo.gepa import GepaPhase

T = TypeVar("T")
Stopped = StopReason | Literal["", "share"]
"""The reason why a phase ended early: a stop reason, or ``share`` for its part of the budget; ``""`` while it runs."""

TextByName = Mapping[str, str]
TaskPlace = tuple[Split, int]
"""A task by split and position; the library calls this a data instance."""

MAX_IDLE = 20
"""After this many consecutive iterations without a rollout, nothing is left to learn."""


class PhaseCancelledError(BaseException):
    """Ends the library's thread after the step was cancelled; not an ``Exception``, which the library would catch."""


class GepaAdapter:
    """Serves ``gepa.optimize`` as its adapter, its reflection model and its stopper.

    Attributes:
        propose_new_texts: ``None``, so that the library's own proposer calls :meth:`reflect`; the attribute must exist.
        stopped: The reason why the phase ended early; ``""`` while it runs.
        refused: Number of consecutive proposals that the static checks refused.

    Args:
        host: The phase, whose coroutines run on the event loop.
        loop: The search's event loop.
        patience: Number of consecutive refused proposals that ends the phase.
    """

    propose_new_texts = None

    def __init__(self, host: "GepaPhase", loop: asyncio.AbstractEventLoop, *, patience: int) -> None:
        self.stopped: Stopped = ""
        self.refused = 0
        self._host = host
        self._loop = loop
        self._patience = patience
        self._asked = 0
        self._idle = 0
        self._paid = -1
        self._waiting: Future[Any] | None = None
        self._tried: set[tuple[tuple[str, str], ...]] = set()
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the phase; called from the event loop's thread."""
        self._is_cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()

    def evaluate(
        self, batch: list[TaskPlace], candidate: dict[str, str], capture_traces: bool = False, **_: Any
    ) -> "EvaluationBatch[Measured | None, str]":
        """Return the rewards of a candidate on a batch; a refused candidate gets minus infinity and costs nothing."""
        del capture_traces  # outcomes are returned as trajectories either way
        refusal = self._wait(lambda: self._host.refusal(candidate))
        if refusal:
            self.refused += 1
            if self.refused >= self._patience:
                self.stopped = "no_proposals"
            lowest, nothing = [float("-inf")] * len(batch), cast("list[Measured | None]", [None] * len(batch))
            return EvaluationBatch([refusal] * len(batch), lowest, nothing, num_metric_calls=0)
        if (key := tuple(sorted(candidate.items()))) not in self._tried:
            self._tried.add(key)
            self.refused = 0
        before = self._host.spent_rollouts()
        try:
            self._wait(lambda: self._host.measure(candidate, batch))
        except BudgetExhaustedError:
            self.stopped = "budget"
            raise
        found = [self._host.known(candidate, place) for place in batch]
        return EvaluationBatch(
            outputs=[measured.rollout if measured else "" for measured in found],
            scores=_filled(found),
            trajectories=found,
            num_metric_calls=self._host.spent_rollouts() - before,  # 0 where all was known
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str], **_: Any
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return the runs of a minibatch as records to reflect on, for each component under review."""
        found = cast("list[Measured | None]", eval_batch.trajectories)
        measured = [item for item in found if item is not None]
        return {name: self._records(name, candidate, measured) for name in components_to_update}

    def reflect(self, prompt: str | list[dict[str, Any]], **_: Any) -> str:
        """Ask the optimiser's model and return its answer; ends the phase if it is down or the budget is spent."""
        if self.stopped:
            raise RunError(self.stopped)
        request = prompt if isinstance(prompt, str) else "\n\n".join(str(part.get("content")) for part in prompt)
        self._asked += 1
        number = self._asked
        try:
            return self._wait(lambda: self._host.ask(request, number))
        except BudgetExhaustedError:
            self.stopped = "budget"
            raise
        except OptimizerDownError:
            self.stopped = "optimizer_unreachable"
            raise

    def should_stop(self, _state: Any = None, **_: Any) -> bool:
        """Return true if the library should stop before its next iteration."""
        if self._is_cancelled:
            raise PhaseCancelledError
        paid = self._host.spent_rollouts()
        self._idle = self._idle + 1 if paid == self._paid else 0
        self._paid = paid
        if not self.stopped and self._idle >= MAX_IDLE:
            self.stopped = "nothing_to_learn"
        self.stopped = self.stopped or self._host.stop_reason()
        return bool(self.stopped)

    def _records(self, name: str, texts: dict[str, str], measured: Sequence[Measured]) -> list[dict[str, Any]]:
        runs = self._wait(lambda: self._host.evidence(name, texts, measured))
        return [
            {
                "Inputs": run.task,
                "Generated Outputs": "\n".join(run.lines),
                "Feedback": run.measured.feedback or f"reward {run.measured.reward:.2f}",
            }
            for run in runs
        ]

    def _wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine on the event loop, block this thread until it is done, and return its result."""
        if self._is_cancelled:
            raise PhaseCancelledError

        async def run() -> T:
            return await work()

        waiting = asyncio.run_coroutine_threadsafe(run(), self._loop)
        self._waiting = waiting
        if self._is_cancelled:  # `cancel` may have come between the check and the assignment
            waiting.cancel()
        try:
            return waiting.result()
        finally:
            self._waiting = None
            if self._is_cancelled:
                raise PhaseCancelledError


def _filled(found: Sequence[Measured | None]) -> list[float]:
    """Return the rewards of a batch, one per task, as the library requires.

    A task that infrastructure broke every time gets the mean of the others, so that the batch's mean stays the same.
    """
    rewards = [measured.reward for measured in found if measured is not None]
    if not rewards:
        raise RunError("infrastructure broke every rollout of a batch")
    mean = fmean(rewards)
    return [mean if measured is None else measured.reward for measured in found]
