"""The contract of a fleet: a runner that places workers on other machines, and never runs an attempt itself.

A fleet is named in ``[runner] use`` like any runner. Its workers claim rollouts from the experiment's store as
``agl worker`` does; the experiment's own process claims none.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agl.algorithms import AlgorithmConfig
from agl.contracts import Algorithm
from agl.schemas import Json

if TYPE_CHECKING:
    from agl_run.worker.fleet_worker import WorkerOrder

LOOP_ROLLOUTS = 256
"""The most rollouts that one event loop should run at once; with more, their calls wait for each other."""


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """The parts of a running experiment that its fleet uses.

    Attributes:
        order: The description of the experiment for other machines, with the experiment's keys. Algorithms get it
            unchanged, and workers get ``order.for_worker()``; see :class:`agl_run.fleets.OrderedWorker`.
        open_rollouts: Returns the number of rollouts that are queued or running.
        fail: Ends the experiment with an error; calls after the first one have no effect.
        say: Shows the user one line.
    """

    order: "WorkerOrder"
    open_rollouts: Callable[[], Awaitable[int]]
    fail: Callable[[BaseException], None]
    say: Callable[[str], None]


@runtime_checkable
class Fleet(Protocol):
    """Places an experiment's workers on a cluster, and also the algorithms that set ``resources``.

    The factory is called with ``placement`` (the table ``[runner.resources]``, or ``None``), with ``concurrency`` and
    with the runner's own parameters, and starts nothing. ``reserve`` is called before ``deploy`` and ``algorithm``,
    and ``stop`` last; after that, ``reserve`` may be called again.
    """

    @property
    def most_attempts(self) -> int:
        """The most attempts that all workers of the fleet together run at once."""
        ...

    def attempts(self) -> tuple[str, dict[str, Json]]:
        """Return the name and the parameters of the runner with which each worker runs attempts."""
        ...

    async def check(self, algorithms: Sequence[AlgorithmConfig]) -> list[str]:
        """Compare the requested cluster shares with the cluster; return the layout as lines of text.

        Args:
            algorithms: The algorithms that set ``resources``.

        Raises:
            ConfigError: A share cannot be placed; the message names it.
        """
        ...

    async def reserve(self, algorithms: Sequence[AlgorithmConfig]) -> None:
        """Connect to the cluster, and reserve the algorithms' shares.

        Raises:
            ConfigError: The cluster cannot be reached, or a share cannot be placed; the message names it.
        """
        ...

    async def deploy(self, setup: FleetSetup) -> None:
        """Begin to start and stop workers as the store's queue of rollouts requires; returns at once."""
        ...

    async def recall(self) -> None:
        """Stop all workers, which give their attempts back; idempotent."""
        ...

    def algorithm(self, config: AlgorithmConfig, setup: FleetSetup) -> Algorithm:
        """Return an algorithm whose steps run in a separate process, on the cluster share reserved for it."""
        ...

    async def stop(self) -> None:
        """Release the reservations and leave the cluster; idempotent."""
        ...
