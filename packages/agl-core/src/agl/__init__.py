"""agl: train agents from their own runs.

The public names. ``import agl`` is cheap: each name is imported when it is first used, so a program that only emits
rewards never loads a store, and a plugin's ``from agl import hookimpl`` loads little more than pluggy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl.capture import current
    from agl.capture.emitters import emit_exception, emit_message, emit_object, emit_observation, emit_reward
    from agl.capture.operation import operation
    from agl.errors import (
        AglError,
        BrokenPluginError,
        CaptureError,
        ConfigError,
        ConflictError,
        DatasetError,
        DuplicateComponentError,
        FencedError,
        MissingTokenIdsError,
        NoModelCallsError,
        NotFoundError,
        PluginError,
        PolicyError,
        RunError,
        SchemaVersionError,
        StoreError,
        TokenError,
        UnknownComponentError,
    )
    from agl.experiment.config import ExperimentConfig
    from agl.experiment.trainer import Trainer
    from agl.hookspecs import hookimpl
    from agl.plugins import PluginManager, PluginStatus
    from agl.records import (
        AlgorithmEntry,
        CommandEntry,
        CreditEntry,
        Entry,
        GatewayEntry,
        LoggerEntry,
        PolicyEntry,
        RewardEntry,
        RunnerEntry,
        StoreEntry,
        TracerEntry,
    )
    from agl.run.litagent import LitAgent, agent, llm_rollout, prompt_rollout, rollout
    from agl.schemas import (
        LLM,
        SCHEMA_VERSION,
        TERMINAL_ATTEMPT,
        TERMINAL_ROLLOUT,
        Attempt,
        AttemptStatus,
        CallCredit,
        Claim,
        Dialect,
        Episode,
        ErrorInfo,
        Json,
        JsonResource,
        Mode,
        ModelCall,
        NamedResources,
        Outcome,
        PromptTemplate,
        Record,
        RejectReason,
        Resource,
        ResourceVersion,
        RetryPolicy,
        Reward,
        RewardScope,
        RewardSource,
        Rollout,
        RolloutStatus,
        Row,
        Sampling,
        Segment,
        Span,
        SpanEvent,
        SpanStatus,
        Transition,
        Weights,
        pack_floats,
        pack_ids,
        unpack_floats,
        unpack_ids,
    )
    from agl.specs import APO, DPO, GEPA, GRPO, PPO, SFT, VERL, Algorithm, AlgorithmSpec, Credit, Policy, Runner, Spec

__version__ = "0.1.0"

__all__ = [
    "APO",
    "AglError",
    "Algorithm",
    "AlgorithmEntry",
    "AlgorithmSpec",
    "Attempt",
    "AttemptStatus",
    "BrokenPluginError",
    "CallCredit",
    "CaptureError",
    "Claim",
    "CommandEntry",
    "ConfigError",
    "ConflictError",
    "Credit",
    "CreditEntry",
    "DPO",
    "DatasetError",
    "Dialect",
    "DuplicateComponentError",
    "Entry",
    "Episode",
    "ErrorInfo",
    "ExperimentConfig",
    "FencedError",
    "GEPA",
    "GRPO",
    "GatewayEntry",
    "Json",
    "JsonResource",
    "LLM",
    "LitAgent",
    "LoggerEntry",
    "MissingTokenIdsError",
    "Mode",
    "ModelCall",
    "NamedResources",
    "NoModelCallsError",
    "NotFoundError",
    "Outcome",
    "PPO",
    "PluginError",
    "PluginManager",
    "PluginStatus",
    "Policy",
    "PolicyEntry",
    "PolicyError",
    "PromptTemplate",
    "Record",
    "RejectReason",
    "Resource",
    "ResourceVersion",
    "RetryPolicy",
    "Reward",
    "RewardEntry",
    "RewardScope",
    "RewardSource",
    "Rollout",
    "RolloutStatus",
    "Row",
    "RunError",
    "Runner",
    "RunnerEntry",
    "SCHEMA_VERSION",
    "SFT",
    "Sampling",
    "SchemaVersionError",
    "Segment",
    "Span",
    "SpanEvent",
    "SpanStatus",
    "Spec",
    "StoreEntry",
    "StoreError",
    "TERMINAL_ATTEMPT",
    "TERMINAL_ROLLOUT",
    "TokenError",
    "TracerEntry",
    "Trainer",
    "Transition",
    "UnknownComponentError",
    "VERL",
    "Weights",
    "agent",
    "current",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_observation",
    "emit_reward",
    "hookimpl",
    "llm_rollout",
    "operation",
    "pack_floats",
    "pack_ids",
    "prompt_rollout",
    "rollout",
    "unpack_floats",
    "unpack_ids",
]

_VALUES = ("agl.errors", "agl.schemas", "agl.records", "agl.specs")
"""Modules of plain values, searched in this order for names that are not below."""

_MODULES = {
    "current": "agl.capture",
    "emit_exception": "agl.capture.emitters",
    "emit_message": "agl.capture.emitters",
    "emit_object": "agl.capture.emitters",
    "emit_observation": "agl.capture.emitters",
    "emit_reward": "agl.capture.emitters",
    "operation": "agl.capture.operation",
    "ExperimentConfig": "agl.experiment.config",
    "Trainer": "agl.experiment.trainer",
    "hookimpl": "agl.hookspecs",
    "PluginManager": "agl.plugins",
    "PluginStatus": "agl.plugins",
    "LitAgent": "agl.run.litagent",
    "agent": "agl.run.litagent",
    "llm_rollout": "agl.run.litagent",
    "prompt_rollout": "agl.run.litagent",
    "rollout": "agl.run.litagent",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = [_MODULES[name]] if name in _MODULES else _VALUES
    value = next(getattr(module, name) for module in map(import_module, homes) if hasattr(module, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
