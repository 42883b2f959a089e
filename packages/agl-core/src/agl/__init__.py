"""agl: train agents from their own runs.

This module has the names that authors of agents and plugins use most. The others are in :mod:`agl.schemas`,
:mod:`agl.acceptance`, :mod:`agl.contracts`, :mod:`agl.errors`, :mod:`agl.hints`, :mod:`agl.algorithms`,
:mod:`agl.tracing`, :mod:`agl.stores`, :mod:`agl.dialects`, :mod:`agl.episodes`, :mod:`agl.semconv` and
:mod:`agl.urls`. ``import agl`` is cheap: each name is imported on first use, so a program that only emits rewards never
loads a store.
"""

from typing import TYPE_CHECKING, Any

from agl._lazy import lazy_names

if TYPE_CHECKING:
    from agl._agents import LitAgent, agent
    from agl._hookspecs import hookimpl
    from agl._plugins import PluginManager
    from agl.acceptance import Gate
    from agl.algorithms import APO, DPO, GEPA, GRPO, PPO, SFT, VERL
    from agl.contracts import (
        Algorithm,
        AlgorithmContext,
        AlgorithmEntry,
        CommandEntry,
        CreditEntry,
        PolicyEntry,
        RewardEntry,
        StepReport,
        Store,
        StoreEntry,
        Tracer,
        TracerEntry,
    )
    from agl.errors import AglError, ConfigError
    from agl.schemas import LLM, Episode, PromptTemplate, Reward, Rollout, Span, Weights
    from agl.tracing import current
    from agl.tracing._emitters import (
        emit_exception,
        emit_message,
        emit_object,
        emit_observation,
        emit_reward,
        operation,
    )
    from agl_run import Trainer

__version__ = "0.1.0"

__all__ = [
    "APO",
    "DPO",
    "GEPA",
    "GRPO",
    "LLM",
    "PPO",
    "SFT",
    "VERL",
    "AglError",
    "Algorithm",
    "AlgorithmContext",
    "AlgorithmEntry",
    "CommandEntry",
    "ConfigError",
    "CreditEntry",
    "Episode",
    "Gate",
    "LitAgent",
    "PluginManager",
    "PolicyEntry",
    "PromptTemplate",
    "Reward",
    "RewardEntry",
    "Rollout",
    "Span",
    "StepReport",
    "Store",
    "StoreEntry",
    "Tracer",
    "TracerEntry",
    "Trainer",
    "Weights",
    "agent",
    "current",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_observation",
    "emit_reward",
    "hookimpl",
    "operation",
]

_ENTRIES = ("AlgorithmEntry", "CommandEntry", "CreditEntry", "PolicyEntry", "RewardEntry", "StoreEntry", "TracerEntry")
_EMITTERS = ("emit_exception", "emit_message", "emit_object", "emit_observation", "emit_reward", "operation")

_get = lazy_names(
    __name__,
    {
        "agl._agents": ("LitAgent", "agent"),
        "agl._entries": _ENTRIES,
        "agl._hookspecs": ("hookimpl",),
        "agl._plugins": ("PluginManager",),
        "agl.acceptance": ("Gate",),
        "agl.algorithms": ("APO", "DPO", "GEPA", "GRPO", "PPO", "SFT", "VERL"),
        "agl.contracts": ("Algorithm", "AlgorithmContext", "StepReport", "Store", "Tracer"),
        "agl.errors": ("AglError", "ConfigError"),
        "agl.schemas": ("Episode", "LLM", "PromptTemplate", "Reward", "Rollout", "Span", "Weights"),
        "agl.tracing": ("current",),
        "agl.tracing._emitters": _EMITTERS,
        "agl_run": ("Trainer",),
    },
)


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        from agl.hints import pip_install

        if error.name != "agl_run":
            raise
        raise ImportError(
            f"agl.{name} is in the distribution agl-run, which is not installed; run: {pip_install('agl-run')}"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
