"""agl_run: run an agent on tasks, record it, and let algorithms learn from it.

The trainer, the configuration that it is built from, and the base of runners. Each name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agl_run.access.secret import SECRET_ENV, SECRET_FILE_ENV, is_secret_given, load_secret, signing_keys
    from agl_run.access.trust import CA_ENV, client_context, refusal_of
    from agl_run.access.worker_token import WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV, WorkerKey, worker_key
    from agl_run.agents.agent import Agent, AgentSpec, LoadedAgent
    from agl_run.config.file import load_config, parse_config
    from agl_run.config.records import (
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
    from agl_run.display.progress import Progress, Quiet
    from agl_run.messages import Messages
    from agl_run.run.fit import DevResult, FitResult
    from agl_run.run.greedy import as_greedy, greedy_policies
    from agl_run.run.trainer import Trainer
    from agl_run.runners.local import AsyncRunner
    from agl_run.runners.refusals import KEY_ADVICE
    from agl_run.runners.setup import RunContext
    from agl_run.worker.heap import settle_heap
    from agl_run.worker.worker import Worker

__all__ = [
    "CA_ENV",
    "KEY_ADVICE",
    "SECRET_ENV",
    "SECRET_FILE_ENV",
    "WORKER_TOKEN_ENV",
    "WORKER_TOKEN_FILE_ENV",
    "Agent",
    "AgentSpec",
    "AsyncRunner",
    "DevResult",
    "ExperimentConfig",
    "ExperimentSection",
    "FitResult",
    "GatewayConfig",
    "LoadedAgent",
    "Messages",
    "PolicyConfig",
    "Progress",
    "Quiet",
    "ResourceConfig",
    "RetentionConfig",
    "RunContext",
    "RunnerConfig",
    "ScheduleConfig",
    "Trainer",
    "Worker",
    "WorkerKey",
    "as_greedy",
    "client_context",
    "greedy_policies",
    "is_secret_given",
    "load_config",
    "load_secret",
    "parse_config",
    "policy",
    "refusal_of",
    "runner",
    "settle_heap",
    "signing_keys",
    "worker_key",
]

_HOMES = {
    "agl_run.access.secret": ("SECRET_ENV", "SECRET_FILE_ENV", "is_secret_given", "load_secret", "signing_keys"),
    "agl_run.access.trust": ("CA_ENV", "client_context", "refusal_of"),
    "agl_run.access.worker_token": ("WORKER_TOKEN_ENV", "WORKER_TOKEN_FILE_ENV", "WorkerKey", "worker_key"),
    "agl_run.agents.agent": ("Agent", "AgentSpec", "LoadedAgent"),
    "agl_run.config.file": ("load_config", "parse_config"),
    "agl_run.config.records": (
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
    ),
    "agl_run.display.progress": ("Progress", "Quiet"),
    "agl_run.messages": ("Messages",),
    "agl_run.run.fit": ("DevResult", "FitResult"),
    "agl_run.run.greedy": ("as_greedy", "greedy_policies"),
    "agl_run.run.trainer": ("Trainer",),
    "agl_run.runners.local": ("AsyncRunner",),
    "agl_run.runners.refusals": ("KEY_ADVICE",),
    "agl_run.runners.setup": ("RunContext",),
    "agl_run.worker.heap": ("settle_heap",),
    "agl_run.worker.worker": ("Worker",),
}


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
