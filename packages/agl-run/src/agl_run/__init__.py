"""agl_run: run an agent on tasks, record it, and let algorithms learn from it.

The public names of the distribution ``agl-run``, besides :mod:`agl_run.commands` and :mod:`agl_run.replay`: the
trainer, the configuration that it is built from, and the base of runners. Each is imported on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agl_run.comparison import Comparison, Criterion, check_better, compare, interval
    from agl_run.experiment.config import (
        ExperimentConfig,
        ExperimentSection,
        GatewayConfig,
        PolicyConfig,
        ResourceConfig,
        RetentionConfig,
        RunnerConfig,
        ScheduleConfig,
        policy,
        runner,
    )
    from agl_run.experiment.file import load_config, parse_config
    from agl_run.experiment.fitting import DevResult, FitResult
    from agl_run.experiment.progress import Progress, Quiet
    from agl_run.experiment.trainer import Trainer
    from agl_run.messages import Messages
    from agl_run.placement import PlacementConfig
    from agl_run.runners.agent import Agent, AgentSpec, LoadedAgent
    from agl_run.runners.attempt import AttemptScope, run_attempt
    from agl_run.runners.judging import RewardError
    from agl_run.runners.local import AsyncRunner
    from agl_run.runners.setup import RunSetup
    from agl_run.runners.worker import Worker, WorkerSetup
    from agl_run.secret import (
        SECRET_ENV,
        SECRET_FILE_ENV,
        is_secret_given,
        load_secret,
        signing_keys,
        state_dir,
    )
    from agl_run.sqlite import SQLiteStore
    from agl_run.trust import CA_ENV, client_context, refusal_of
    from agl_run.worker_token import WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV, WorkerKey, worker_key

__all__ = [
    "CA_ENV",
    "SECRET_ENV",
    "SECRET_FILE_ENV",
    "WORKER_TOKEN_ENV",
    "WORKER_TOKEN_FILE_ENV",
    "Agent",
    "AgentSpec",
    "AsyncRunner",
    "AttemptScope",
    "Comparison",
    "Criterion",
    "DevResult",
    "ExperimentConfig",
    "ExperimentSection",
    "FitResult",
    "GatewayConfig",
    "LoadedAgent",
    "Messages",
    "PlacementConfig",
    "PolicyConfig",
    "Progress",
    "Quiet",
    "ResourceConfig",
    "RetentionConfig",
    "RewardError",
    "RunSetup",
    "RunnerConfig",
    "SQLiteStore",
    "ScheduleConfig",
    "Trainer",
    "Worker",
    "WorkerKey",
    "WorkerSetup",
    "check_better",
    "client_context",
    "compare",
    "interval",
    "is_secret_given",
    "load_config",
    "load_secret",
    "parse_config",
    "policy",
    "refusal_of",
    "run_attempt",
    "runner",
    "signing_keys",
    "state_dir",
    "worker_key",
]

_CONFIG = (
    "ExperimentConfig",
    "ExperimentSection",
    "GatewayConfig",
    "PolicyConfig",
    "ResourceConfig",
    "RetentionConfig",
    "RunnerConfig",
    "ScheduleConfig",
    "policy",
    "runner",
)
_HOMES = {
    "agl_run.comparison": ("Comparison", "Criterion", "check_better", "compare", "interval"),
    "agl_run.experiment.config": _CONFIG,
    "agl_run.experiment.file": ("load_config", "parse_config"),
    "agl_run.experiment.fitting": ("DevResult", "FitResult"),
    "agl_run.experiment.progress": ("Progress", "Quiet"),
    "agl_run.experiment.trainer": ("Trainer",),
    "agl_run.messages": ("Messages",),
    "agl_run.placement": ("PlacementConfig",),
    "agl_run.runners.agent": ("Agent", "AgentSpec", "LoadedAgent"),
    "agl_run.runners.attempt": ("AttemptScope", "run_attempt"),
    "agl_run.runners.judging": ("RewardError",),
    "agl_run.runners.local": ("AsyncRunner",),
    "agl_run.runners.setup": ("RunSetup",),
    "agl_run.runners.worker": ("Worker", "WorkerSetup"),
    "agl_run.secret": (
        "SECRET_ENV",
        "SECRET_FILE_ENV",
        "is_secret_given",
        "load_secret",
        "signing_keys",
        "state_dir",
    ),
    "agl_run.sqlite": ("SQLiteStore",),
    "agl_run.trust": ("CA_ENV", "client_context", "refusal_of"),
    "agl_run.worker_token": ("WORKER_TOKEN_ENV", "WORKER_TOKEN_FILE_ENV", "WorkerKey", "worker_key"),
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
