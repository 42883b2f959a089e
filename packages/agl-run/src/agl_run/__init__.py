"""agl_run: run an agent on tasks, record its rollouts, and let algorithms learn from them.

The package exports the trainer, the configuration from which a trainer is built, and the base class of runners.
Each name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agl_run.access.secret import SECRET_ENV as SECRET_ENV
    from agl_run.access.secret import SECRET_FILE_ENV as SECRET_FILE_ENV
    from agl_run.access.secret import is_secret_given as is_secret_given
    from agl_run.access.secret import load_secret as load_secret
    from agl_run.access.secret import signing_keys as signing_keys
    from agl_run.access.trust import CA_ENV as CA_ENV
    from agl_run.access.trust import client_context as client_context
    from agl_run.access.trust import refusal_of as refusal_of
    from agl_run.access.worker_token import WORKER_TOKEN_ENV as WORKER_TOKEN_ENV
    from agl_run.access.worker_token import WORKER_TOKEN_FILE_ENV as WORKER_TOKEN_FILE_ENV
    from agl_run.access.worker_token import WorkerKey as WorkerKey
    from agl_run.access.worker_token import worker_key as worker_key
    from agl_run.agents.agent import Agent as Agent
    from agl_run.agents.agent import AgentSpec as AgentSpec
    from agl_run.agents.agent import LoadedAgent as LoadedAgent
    from agl_run.agents.importing import import_attribute as import_attribute
    from agl_run.config.file import load_config as load_config
    from agl_run.config.file import parse_config as parse_config
    from agl_run.config.learning import CanarySettings as CanarySettings
    from agl_run.config.learning import GateSettings as GateSettings
    from agl_run.config.learning import LearnSettings as LearnSettings
    from agl_run.config.learning import ReplaySettings as ReplaySettings
    from agl_run.config.learning import SignalSettings as SignalSettings
    from agl_run.config.learning import example_tasks as example_tasks
    from agl_run.config.learning import learner_of as learner_of
    from agl_run.config.sections import ExperimentConfig as ExperimentConfig
    from agl_run.config.sections import ExperimentSection as ExperimentSection
    from agl_run.config.sections import GatewayConfig as GatewayConfig
    from agl_run.config.sections import PolicyConfig as PolicyConfig
    from agl_run.config.sections import ResourceConfig as ResourceConfig
    from agl_run.config.sections import RetentionConfig as RetentionConfig
    from agl_run.config.sections import RunnerConfig as RunnerConfig
    from agl_run.config.sections import ScheduleConfig as ScheduleConfig
    from agl_run.config.sections import policy as policy
    from agl_run.config.sections import runner as runner
    from agl_run.display.progress import Progress as Progress
    from agl_run.display.progress import Quiet as Quiet
    from agl_run.messages import Messages as Messages
    from agl_run.run.fit import DevResult as DevResult
    from agl_run.run.fit import FitResult as FitResult
    from agl_run.run.greedy import as_greedy as as_greedy
    from agl_run.run.greedy import greedy_policies as greedy_policies
    from agl_run.run.trainer import Trainer as Trainer
    from agl_run.runners.local import AsyncRunner as AsyncRunner
    from agl_run.runners.refusals import KEY_ADVICE as KEY_ADVICE
    from agl_run.runners.setup import RunContext as RunContext
    from agl_run.worker.address import advertised_url as advertised_url
    from agl_run.worker.address import is_loopback as is_loopback
    from agl_run.worker.heap import settle_heap as settle_heap
    from agl_run.worker.worker import Worker as Worker


_HOMES = {
    "agl_run.access.secret": ("SECRET_ENV", "SECRET_FILE_ENV", "is_secret_given", "load_secret", "signing_keys"),
    "agl_run.access.trust": ("CA_ENV", "client_context", "refusal_of"),
    "agl_run.access.worker_token": ("WORKER_TOKEN_ENV", "WORKER_TOKEN_FILE_ENV", "WorkerKey", "worker_key"),
    "agl_run.agents.agent": ("Agent", "AgentSpec", "LoadedAgent"),
    "agl_run.agents.importing": ("import_attribute",),
    "agl_run.config.file": ("load_config", "parse_config"),
    "agl_run.config.learning": (
        "CanarySettings",
        "GateSettings",
        "LearnSettings",
        "ReplaySettings",
        "SignalSettings",
        "example_tasks",
        "learner_of",
    ),
    "agl_run.config.sections": (
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
    "agl_run.worker.address": ("advertised_url", "is_loopback"),
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
    return sorted({*globals(), *(name for names in _HOMES.values() for name in names)})
