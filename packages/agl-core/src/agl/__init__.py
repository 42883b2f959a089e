"""agl: train agents from their own runs.

The public names. ``import agl`` is cheap: each name is imported when it is first used, so a program that only emits
rewards never loads a store, and a plugin's ``from agl import hookimpl`` loads little more than pluggy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl._agents import LitAgent, agent, llm_rollout, prompt_rollout, rollout
    from agl._entries import (
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
    from agl._hookspecs import hookimpl
    from agl._plugins import PluginManager, PluginStatus
    from agl.algorithms import (
        APO,
        DPO,
        GEPA,
        GRPO,
        PPO,
        SFT,
        VERL,
        Algorithm,
        AlgorithmSpec,
        Credit,
        Policy,
        Runner,
        Spec,
    )
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
    from agl.tracing import current
    from agl.tracing._emitters import emit_exception, emit_message, emit_object, emit_observation, emit_reward
    from agl.tracing._operation import operation
    from agl_run import ExperimentConfig, Trainer

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

_HOMES = {
    "agl._agents": ("LitAgent", "agent", "llm_rollout", "prompt_rollout", "rollout"),
    "agl._hookspecs": ("hookimpl",),
    "agl._plugins": ("PluginManager", "PluginStatus"),
    "agl.tracing._context": ("current",),
    "agl.tracing._emitters": ("emit_exception", "emit_message", "emit_object", "emit_observation", "emit_reward"),
    "agl.tracing._operation": ("operation",),
}
_VALUES = ("agl.errors", "agl.schemas", "agl._entries", "agl.algorithms")
"""Modules of plain values, searched in this order for names that are not above."""

_RUN = ("ExperimentConfig", "Trainer")
"""Names that belong to the distribution ``agl-run``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _RUN:
        homes: tuple[str, ...] = ("agl_run",)
    else:
        homes = tuple(home for home, names in _HOMES.items() if name in names) or _VALUES
    try:
        modules = [import_module(home) for home in homes]
    except ModuleNotFoundError as error:
        if error.name != "agl_run":
            raise
        raise ImportError(
            f"agl.{name} is in the distribution agl-run, which is not installed; run: pip install agl-run"
        ) from error
    value = globals()[name] = next(getattr(module, name) for module in modules if hasattr(module, name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
