"""The contract of a fleet: a runner that places workers on other machines, and never carries an attempt itself.

A fleet stands in ``[runner] use`` like any runner. Its workers claim rollouts from the experiment's store, as those of
``agl worker`` do; the experiment's own process claims none.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agl.algorithms import AlgorithmConfig
from agl.contracts import Algorithm
from agl.schemas import Json

if TYPE_CHECKING:
    from agl_run.worker.order import WorkerOrder

LOOP_ROLLOUTS = 256
"""Rollouts that one event loop should hold at most; beyond that their calls wait for each other."""


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """The parts of a running experiment that a fleet works for.

    Attributes:
        order: The order of what runs elsewhere, with the keys: algorithms get it as it is, and workers
            ``order.for_worker()``; see :class:`agl_run.fleets.OrderedWorker`.
        open_rollouts: Returns the number of rollouts that are queued or running.
        fail: Ends the experiment with an error; only the first one counts.
        say: Shows the user one line.
    """

    order: "WorkerOrder"
    open_rollouts: Callable[[], Awaitable[int]]
    fail: Callable[[BaseException], None]
    say: Callable[[str], None]


@runtime_checkable
class Fleet(Protocol):
    """Places an experiment's workers, and those algorithms that have ``resources``.

    The factory is called with ``placement``, the table ``[runner.resources]`` or ``None``, with ``concurrency`` and
    with the runner's own parameters. It starts nothing. ``reserve`` comes before ``deploy`` and ``algorithm``, and
    ``stop`` last; afterwards ``reserve`` may begin again.
    """

    @property
    def most_attempts(self) -> int:
        """The attempts that all workers together run at once, at most."""
        ...

    def attempts(self) -> tuple[str, dict[str, Json]]:
        """Return the name and the parameters of the runner that each worker runs attempts with."""
        ...

    async def check(self, algorithms: Sequence[AlgorithmConfig]) -> list[str]:
        """Compare what the experiment asks for with the cluster; returns the layout as lines of text.

        Args:
            algorithms: Those that have ``resources``.

        Raises:
            ConfigError: Something cannot be placed; names it.
        """
        ...

    async def reserve(self, algorithms: Sequence[AlgorithmConfig]) -> None:
        """Connect to the cluster, and reserve what the algorithms ask for.

        Raises:
            ConfigError: The cluster cannot be reached, or something cannot be placed; names it.
        """
        ...

    async def deploy(self, setup: FleetSetup) -> None:
        """Begin to start and stop workers as the store's queue asks for; returns at once."""
        ...

    async def recall(self) -> None:
        """Stop all workers, which give their attempts back; idempotent."""
        ...

    def algorithm(self, config: AlgorithmConfig, setup: FleetSetup) -> Algorithm:
        """Return an algorithm whose steps run in a process of their own, in its reservation."""
        ...

    async def stop(self) -> None:
        """Release the reservations and leave the cluster; idempotent."""
        ...
