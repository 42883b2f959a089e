"""The names of Agent Lightning 0.3 on the parts of this project: ``import agl_lightning as agl``.

A script that was written for Agent Lightning runs after its imports are changed to this module. Each public name of
that release and of its submodules works here, or can be imported and raises a :class:`~agl.errors.ConfigError` when it
is used; the error names the replacement and the page that describes it. New programs should use :mod:`agl` and
:mod:`agl_run`.
"""

from typing import TYPE_CHECKING, Any

from agl import PromptTemplate as PromptTemplate
from agl.contracts import Store
from agl.contracts import Tracer as Tracer
from agl.schemas import LLM as LLM
from agl.schemas import AttemptStatus as AttemptStatus
from agl.schemas import Mode
from agl.schemas import NamedResources as NamedResources
from agl.schemas import Resource as Resource
from agl.schemas import RolloutStatus as RolloutStatus
from agl.schemas import Span as Span
from agl_lightning.adapters import LlmProxyTraceToTriplet as LlmProxyTraceToTriplet
from agl_lightning.adapters import TracerTraceToTriplet as TracerTraceToTriplet
from agl_lightning.adapters import TraceToMessages as TraceToMessages
from agl_lightning.adapters import find_final_reward as find_final_reward
from agl_lightning.adapters import find_reward_spans as find_reward_spans
from agl_lightning.adapters import get_message_value as get_message_value
from agl_lightning.adapters import get_object_value as get_object_value
from agl_lightning.adapters import get_reward_value as get_reward_value
from agl_lightning.adapters import get_rewards_from_span as get_rewards_from_span
from agl_lightning.adapters import is_reward_span as is_reward_span
from agl_lightning.agents import LitAgent as LitAgent
from agl_lightning.agents import llm_rollout as llm_rollout
from agl_lightning.agents import prompt_rollout as prompt_rollout
from agl_lightning.agents import rollout as rollout
from agl_lightning.algorithms import APO as APO
from agl_lightning.algorithms import VERL as VERL
from agl_lightning.algorithms import Baseline as Baseline
from agl_lightning.components import AgentOpsTracer as AgentOpsTracer
from agl_lightning.components import ClientServerExecutionStrategy as ClientServerExecutionStrategy
from agl_lightning.components import DevTaskLoader as DevTaskLoader
from agl_lightning.components import DummyTracer as DummyTracer
from agl_lightning.components import InMemoryLightningStore as InMemoryLightningStore
from agl_lightning.components import LightningStoreThreaded as LightningStoreThreaded
from agl_lightning.components import OtelTracer as OtelTracer
from agl_lightning.components import SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy
from agl_lightning.emitters import emit_annotation as emit_annotation
from agl_lightning.emitters import emit_exception as emit_exception
from agl_lightning.emitters import emit_message as emit_message
from agl_lightning.emitters import emit_object as emit_object
from agl_lightning.emitters import emit_reward as emit_reward
from agl_lightning.emitters import operation as operation
from agl_lightning.emitters import reward as reward
from agl_lightning.logs import configure_logger as configure_logger
from agl_lightning.logs import setup_logging as setup_logging
from agl_lightning.logs import setup_module_logging as setup_module_logging
from agl_lightning.types import Attempt as Attempt
from agl_lightning.types import AttemptedRollout as AttemptedRollout
from agl_lightning.types import Attributes as Attributes
from agl_lightning.types import AttributeValue as AttributeValue
from agl_lightning.types import Dataset as Dataset
from agl_lightning.types import Rollout as Rollout
from agl_lightning.types import RolloutRawResult as RolloutRawResult
from agl_lightning.types import TaskInput as TaskInput
from agl_lightning.types import Triplet as Triplet

if TYPE_CHECKING:
    from agl_lightning.trainer import LitAgentRunner as LitAgentRunner
    from agl_lightning.trainer import Trainer as Trainer

LightningStore = Store
"""The contract of stores."""

ProxyLLM = LLM
"""The same as ``LLM``."""

ResourceUnion = Resource
"""The same as ``Resource``."""

RolloutMode = Mode
"""The mode of a rollout."""

SpanLike = Span
"""The same as ``Span``."""

_LATE = ("LitAgentRunner", "Trainer")
"""Names that are imported only on first use, because an agent's process needs only the decorators."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        from agl_lightning.replaced import replaced

        return replaced(name)
    from agl_lightning import trainer

    return getattr(trainer, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
