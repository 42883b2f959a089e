"""Changes the SDK's process-wide settings for the tracer, and restores them.

These are the trace processors, the switch that disables tracing, and the API of the default model. The SDK has
setters for them and no getters, so private fields are read here, and nowhere else.
"""

import os
from typing import Any

from agents import set_default_openai_api, set_trace_processors, set_tracing_disabled
from agents.models import _openai_shared
from agents.tracing import TracingProcessor, get_trace_provider

from agl_openai_agents._processor import AgentsProcessor

_DISABLED = "OPENAI_AGENTS_DISABLE_TRACING"


class SdkSettings:
    """The SDK's settings while one processor observes it."""

    def __init__(self, processor: AgentsProcessor) -> None:
        self._processor = processor
        self._flag: bool | None = None
        self._is_chat_forced = False

    def apply(self) -> None:
        """Install the processor as the only one, in front of the others, and enable tracing; safe to repeat."""
        there = _processors()
        if there != (self._processor,):
            added = [item for item in there if item is not self._processor]
            kept = self._processor.others if self._processor in there else ()
            self._processor.others = (*kept, *added)
            set_trace_processors([self._processor])
        flag = _flag()
        if _is_disabled(flag):
            self._flag = flag
            self._processor.is_forwarding = False
            set_tracing_disabled(False)

    def prefer_chat_completions(self) -> None:
        """Use chat completions for models without an explicit API.

        The Responses API gives no log-probabilities for tool calls, so they could not be trained.
        """
        if not self._is_chat_forced and _openai_shared.get_use_responses_by_default():
            self._is_chat_forced = True
            set_default_openai_api("chat_completions")

    def restore(self) -> None:
        """Restore the SDK's settings; processors that the program added since stay."""
        added = [item for item in _processors() if item is not self._processor]
        self._processor.is_on = False
        set_trace_processors([*self._processor.others, *added])
        if not self._processor.is_forwarding:
            _restore_tracing(self._flag)
        if self._is_chat_forced:
            set_default_openai_api("responses")


def _processors() -> tuple[TracingProcessor, ...]:
    inner: Any = getattr(get_trace_provider(), "_multi_processor", None)
    return tuple(getattr(inner, "_processors", ()))


def _flag() -> bool | None:
    """The program's own choice, True for disabled; ``None`` where it leaves that to the environment."""
    return getattr(get_trace_provider(), "_manual_disabled", None)


def _is_disabled(flag: bool | None) -> bool:
    return os.environ.get(_DISABLED, "false").lower() in ("true", "1") if flag is None else flag


def _restore_tracing(flag: bool | None) -> None:
    if flag is None:
        provider: Any = get_trace_provider()
        provider._manual_disabled = None
    else:
        set_tracing_disabled(flag)
