"""agl_run: run an agent on tasks, record it, and let algorithms learn from it.

The public names of the distribution ``agl-run``, besides :mod:`agl_run.commands` and :mod:`agl_run.replay`. Each is
imported when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agl_run.comparison import Comparison, Criterion, check_better, compare, interval, says
    from agl_run.experiment.config import ExperimentConfig, ScheduleConfig, load_config, parse_config
    from agl_run.experiment.progress import Quiet
    from agl_run.experiment.trainer import DevResult, FitResult, Trainer
    from agl_run.runners.agent import AgentSpec
    from agl_run.runners.local import AsyncRunner
    from agl_run.runners.setup import RunSetup
    from agl_run.runners.worker import Worker, WorkerSetup
    from agl_run.sqlite import SQLiteStore

__all__ = [
    "AgentSpec",
    "AsyncRunner",
    "Comparison",
    "Criterion",
    "DevResult",
    "ExperimentConfig",
    "FitResult",
    "Quiet",
    "RunSetup",
    "SQLiteStore",
    "ScheduleConfig",
    "Trainer",
    "Worker",
    "WorkerSetup",
    "check_better",
    "compare",
    "interval",
    "load_config",
    "parse_config",
    "says",
]

_HOMES = {
    "agl_run.comparison": ("Comparison", "Criterion", "check_better", "compare", "interval", "says"),
    "agl_run.experiment.config": ("ExperimentConfig", "ScheduleConfig", "load_config", "parse_config"),
    "agl_run.experiment.progress": ("Quiet",),
    "agl_run.experiment.trainer": ("DevResult", "FitResult", "Trainer"),
    "agl_run.runners.agent": ("AgentSpec",),
    "agl_run.runners.local": ("AsyncRunner",),
    "agl_run.runners.setup": ("RunSetup",),
    "agl_run.runners.worker": ("Worker", "WorkerSetup"),
    "agl_run.sqlite": ("SQLiteStore",),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
