"""Where a trace processor stands in the SDK, and whether the SDK traces at all: taken, kept, and given back.

The SDK can set both and tell neither, so the private fields are read here, and nowhere else.
"""

import os
from typing import Any

from agents import set_trace_processors, set_tracing_disabled
from agents.tracing import TracingProcessor, get_trace_provider

from agl_openai_agents._processor import RolloutProcessor

_DISABLED = "OPENAI_AGENTS_DISABLE_TRACING"


class Place:
    """The place of one processor."""

    def __init__(self, processor: RolloutProcessor) -> None:
        self._processor = processor
        self._flag: bool | None = None

    def take(self) -> None:
        """Stand alone among the SDK's processors, those that were there behind; again where the program changed it."""
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

    def give_back(self) -> None:
        """The SDK as it was, with what the program added since."""
        added = [item for item in _processors() if item is not self._processor]
        self._processor.is_on = False
        set_trace_processors([*self._processor.others, *added])
        if not self._processor.is_forwarding:
            _restore(self._flag)


def _processors() -> tuple[TracingProcessor, ...]:
    inner: Any = getattr(get_trace_provider(), "_multi_processor", None)
    return tuple(getattr(inner, "_processors", ()))


def _flag() -> bool | None:
    """What the program set; ``None`` where it left that to the environment."""
    return getattr(get_trace_provider(), "_manual_disabled", None)


def _is_disabled(flag: bool | None) -> bool:
    return os.environ.get(_DISABLED, "false").lower() in ("true", "1") if flag is None else flag


def _restore(flag: bool | None) -> None:
    if flag is None:
        provider: Any = get_trace_provider()
        provider._manual_disabled = None
    else:
        set_tracing_disabled(flag)
