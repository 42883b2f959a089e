"""Attributes model calls to agents in the OpenAI Agents SDK, through its trace processors.

The tracer's processor replaces the installed ones, including the SDK's own exporter, which sends every prompt to its
vendor. Outside of rollouts the processor forwards everything to them, so that a program's own tracing goes on.

The gateway or the wire hook records the model calls themselves; the ``chat`` spans made here say which agent made them.
If a policy is in training, agents without an explicit API use chat completions instead of Responses. A call of a
program's own model that bypasses the wire, and that no span of the SDK reports, gets a span here.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from agl.tracing import ActiveAttempt, SharedTracer, Undo, around_attempts

if TYPE_CHECKING:
    from agl_openai_agents._processor import AgentsProcessor, SdkSettings


class OpenAIAgentsTracer(SharedTracer):
    """Observes the OpenAI Agents SDK; see the module. Several tracers may be installed; they share one processor."""

    _processor: ClassVar["AgentsProcessor | None"] = None

    def observe(self) -> Iterable[Undo]:
        """Replace the SDK's processors; undoing this keeps processors that were added in the meantime."""
        from agl_openai_agents._processor import AgentsProcessor, SdkSettings, watch_models  # loads the SDK

        processor = OpenAIAgentsTracer._processor = AgentsProcessor()
        settings = SdkSettings(processor)
        settings.apply()
        yield settings.restore
        yield around_attempts(partial(_observe, processor, settings))
        yield watch_models()

    def current_span_id(self) -> str | None:
        """Return the id of the span to which a model call in this context belongs; ``None`` if there is none."""
        opened = None if self._processor is None else self._processor.current_started()
        return None if opened is None else opened.span_id


@contextmanager
def _observe(processor: "AgentsProcessor", settings: "SdkSettings", attempt: ActiveAttempt) -> Generator[None]:
    """Apply the settings again for one attempt, because a module imported since may have set its own processors."""
    settings.apply()
    if any(upstream.is_trained for upstream in attempt.upstreams):
        settings.prefer_chat_completions()
    try:
        yield
    finally:
        processor.forget(attempt)
