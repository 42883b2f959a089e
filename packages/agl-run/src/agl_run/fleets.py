"""Exports the parts of runners that place workers on other machines: the contract of a fleet, and its worker."""

from agl_run.fleet import LOOP_ROLLOUTS as LOOP_ROLLOUTS
from agl_run.fleet import Fleet as Fleet
from agl_run.fleet import FleetSetup as FleetSetup
from agl_run.worker.fleet_worker import OrderedWorker as OrderedWorker
from agl_run.worker.fleet_worker import WorkerOrder as WorkerOrder
