"""The names of Agent Lightning 0.3 on the parts of this project: ``import agl_lightning as agl``.

A script that was written for Agent Lightning runs with its import lines changed to this module. Each public name of
that release either works here, or raises a :class:`~agl.errors.ConfigError` that names what replaced it and the page
that describes it. New programs use :mod:`agl` and :mod:`agl_run`.
"""

from typing import TYPE_CHECKING, Any

from agl import PromptTemplate
from agl.contracts import Store as LightningStore
from agl.contracts import Tracer
from agl.schemas import LLM, AttemptStatus, NamedResources, Resource, RolloutStatus, Span
from agl.schemas import LLM as ProxyLLM  # noqa: N811  # one class is both here
from agl.schemas import Mode as RolloutMode
from agl.schemas import Resource as ResourceUnion
from agl.schemas import Span as SpanLike
from agl_lightning.adapters import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages
from agl_lightning.agents import LitAgent, llm_rollout, prompt_rollout, rollout
from agl_lightning.algorithms import APO, VERL, Baseline
from agl_lightning.components import (
    AgentOpsTracer,
    ClientServerExecutionStrategy,
    DevTaskLoader,
    DummyTracer,
    InMemoryLightningStore,
    LightningStoreThreaded,
    OtelTracer,
    SharedMemoryExecutionStrategy,
)
from agl_lightning.emitters import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    operation,
    reward,
)
from agl_lightning.logs import configure_logger, setup_logging, setup_module_logging
from agl_lightning.reading import (
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)
from agl_lightning.types import (
    Attempt,
    AttemptedRollout,
    Attributes,
    AttributeValue,
    Dataset,
    Rollout,
    RolloutRawResult,
    TaskInput,
    Triplet,
)

if TYPE_CHECKING:
    from agl_lightning.runner import LitAgentRunner
    from agl_lightning.trainer import Trainer

__all__ = [
    "APO",
    "LLM",
    "VERL",
    "AgentOpsTracer",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "AttributeValue",
    "Attributes",
    "Baseline",
    "ClientServerExecutionStrategy",
    "Dataset",
    "DevTaskLoader",
    "DummyTracer",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreThreaded",
    "LitAgent",
    "LitAgentRunner",
    "LlmProxyTraceToTriplet",
    "NamedResources",
    "OtelTracer",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "ResourceUnion",
    "Rollout",
    "RolloutMode",
    "RolloutRawResult",
    "RolloutStatus",
    "SharedMemoryExecutionStrategy",
    "Span",
    "SpanLike",
    "TaskInput",
    "TraceToMessages",
    "Tracer",
    "TracerTraceToTriplet",
    "Trainer",
    "Triplet",
    "configure_logger",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "reward",
    "rollout",
    "setup_logging",
    "setup_module_logging",
]


def __getattr__(name: str) -> Any:
    # An agent's process needs the decorators only, so the trainer is imported when somebody asks for it.
    if name == "Trainer":
        from agl_lightning.trainer import Trainer

        return Trainer
    if name == "LitAgentRunner":
        from agl_lightning.runner import LitAgentRunner

        return LitAgentRunner
    from agl_lightning.replaced import refuse

    refuse(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
