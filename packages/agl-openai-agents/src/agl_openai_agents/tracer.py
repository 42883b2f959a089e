"""Attributes model calls to agents in the OpenAI Agents SDK, through its trace processors.

The tracer's processor replaces the installed ones, among them the SDK's own exporter, which posts every prompt to its
vendor. Outside rollouts it forwards everything to them, so that a program's own tracing goes on. The gateway or the
wire hook records the model calls themselves; the ``chat`` spans made here give their place. Where a policy is in
training, agents without an explicit API use chat completions instead of Responses. A model of the program's own that
bypasses the wire, and that no span of the SDK reports, gets a span here.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from agl.tracing import ActiveAttempt, SharedTracer, Undo, around_attempts

if TYPE_CHECKING:
    from agl_openai_agents._processor import AgentsProcessor, SdkSettings


class OpenAIAgentsTracer(SharedTracer):
    """Observes the OpenAI Agents SDK; see the module. Several may be installed at once; they share one processor."""

    _processor: ClassVar["AgentsProcessor | None"] = None

    def observe(self) -> Iterable[Undo]:
        """Replace the SDK's processors; those that were added since stay when they are restored."""
        from agl_openai_agents._processor import AgentsProcessor, SdkSettings, watch_models  # loads the SDK

        processor = OpenAIAgentsTracer._processor = AgentsProcessor()
        settings = SdkSettings(processor)
        settings.apply()
        yield settings.restore
        yield around_attempts(partial(_observe, processor, settings))
        yield watch_models()

    def current_span_id(self) -> str | None:
        """Id of the span that a model call of this context belongs to."""
        opened = None if self._processor is None else self._processor.current_started()
        return None if opened is None else opened.span_id


@contextmanager
def _observe(processor: "AgentsProcessor", settings: "SdkSettings", attempt: ActiveAttempt) -> Generator[None]:
    """Apply the settings again for one attempt: a program imported since may have set its own processors."""
    settings.apply()
    if any(upstream.is_trained for upstream in attempt.upstreams):
        settings.prefer_chat_completions()
    try:
        yield
    finally:
        processor.forget(attempt)
