"""Parts of runners that place workers on other machines: their contract, and the worker that they place there."""

from agl_run.experiment.worker_order import OrderedWorker, WorkerOrder
from agl_run.runners.fleet import LOOP_ROLLOUTS, Fleet, FleetSetup

__all__ = [
    "LOOP_ROLLOUTS",
    "Fleet",
    "FleetSetup",
    "OrderedWorker",
    "WorkerOrder",
]
