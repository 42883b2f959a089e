"""Parts of runners that place workers on other machines: their contract, and the worker that they place there."""

from agl_run.fleet import LOOP_ROLLOUTS, Fleet, FleetSetup
from agl_run.worker.order import OrderedWorker, WorkerOrder

__all__ = [
    "LOOP_ROLLOUTS",
    "Fleet",
    "FleetSetup",
    "OrderedWorker",
    "WorkerOrder",
]
