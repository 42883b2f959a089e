"""Attributes model calls to agents in the OpenAI Agents SDK, through its trace processors.

The tracer's processor replaces the installed ones, among them the SDK's own exporter, which posts every prompt to its
vendor. Outside rollouts it forwards everything to them, so that a program's own tracing goes on. The gateway or the
wire hook records the model calls themselves; the ``chat`` spans made here give their place. Where a policy is in
training, agents without an explicit API use chat completions instead of Responses. A model of the program's own that
bypasses the wire, and that no span of the SDK reports, gets a span here.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from agl.contracts import Tracer
from agl.tracing import ActiveAttempt, Undo, around_attempts

if TYPE_CHECKING:
    from agl_openai_agents._processor import AgentsProcessor
    from agl_openai_agents._sdk_settings import SdkSettings


class OpenAIAgentsTracer(Tracer):
    """Observes the OpenAI Agents SDK; see the module. Several may be installed at once; they share one processor."""

    _installed: ClassVar[set["OpenAIAgentsTracer"]] = set()
    _undo: ClassVar[list[Undo]] = []
    _processor: ClassVar["AgentsProcessor | None"] = None

    def install(self) -> None:
        """Replace the SDK's processors; idempotent."""
        from agl_openai_agents._models import watch_models
        from agl_openai_agents._processor import AgentsProcessor
        from agl_openai_agents._sdk_settings import SdkSettings  # loads the SDK

        if not self._installed:
            processor = OpenAIAgentsTracer._processor = AgentsProcessor()
            settings = SdkSettings(processor)
            settings.apply()
            observe = partial(_observe, processor, settings)
            self._undo.extend([settings.restore, around_attempts(observe), watch_models()])
        self._installed.add(self)

    def uninstall(self) -> None:
        """Restore the earlier processors when the last tracer is uninstalled; those that were added since stay."""
        self._installed.discard(self)
        while self._undo and not self._installed:
            self._undo.pop()()

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
