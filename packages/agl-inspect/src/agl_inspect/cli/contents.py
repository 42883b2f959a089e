"""Formats the contents of spans for people: messages, tool calls with their arguments, results and tracebacks.

Everything here was written by agents, models and tools, and may have any shape.
"""

from typing import Any

from agl import semconv
from agl.dialects import call_messages
from agl.schemas import ErrorInfo, ModelCall, Span, to_json
from agl_inspect.rollouts.conversations import ShownMessages, labelled_texts

CUT = 200
"""Characters of a text that are shown unless all of it is asked for."""

TRACEBACK_LINES = 8
"""Lines of a traceback that are shown unless all of it is asked for: its end, where the error is."""

_LABELS = {
    semconv.TOOL_ARGUMENTS: "arguments",
    semconv.TOOL_RESULT: "result",
    semconv.MESSAGE: "message",
    semconv.OBJECT: "object",
    semconv.OBSERVATION_CONTENT: "says",
    semconv.OUTPUT: "returned",
}
_ON_THE_LINE = (semconv.OBSERVATION_CONTENT, semconv.OUTPUT)
"""Attributes that a span's own line begins to show."""

_STACKTRACE = "exception.stacktrace"


class Contents:
    """Formats spans one after the other; messages that an earlier call has shown are not repeated.

    Args:
        is_full: Show every text whole.

    Attributes:
        is_full: Whether every text is shown whole.
        is_cut: Whether anything was shortened so far.
    """

    def __init__(self, *, is_full: bool) -> None:
        self.is_full = is_full
        self._shown = ShownMessages()
        self.is_cut = False

    def of(self, span: Span) -> list[str]:
        """Return the lines below the span's own."""
        lines: list[str] = []
        for name, label in _LABELS.items():
            if name in span.attributes and (self.is_full or name not in _ON_THE_LINE):
                lines += self.text(label, span.attributes[name])
        lines += self._messages(span) if span.call is None else self._conversation(span.call)
        if span.reward is not None and span.reward.feedback:
            lines += self.text("feedback", span.reward.feedback)
        for event in span.events:
            if self.is_full and _STACKTRACE in event.attributes:
                lines += self.traceback(str(event.attributes[_STACKTRACE]))
        return lines

    def of_error(self, error: ErrorInfo) -> list[str]:
        """Return the lines below a failed attempt's own: the traceback, and a long message whole."""
        message = self.text("message", error.message) if self.is_full and len(error.message) > CUT else []
        return [*self.traceback(error.traceback), *message]

    def text(self, label: str, value: Any) -> list[str]:
        """Return a labelled text: whole, with its lines below each other, or the beginning on one line."""
        text = value if isinstance(value, str) else to_json(value).decode()
        if self.is_full:
            first, *rest = text.splitlines() or [""]
            return [f"{label}: {first}", *(f"  {line}" for line in rest)]
        text = " ".join(text.split())
        if len(text) <= CUT:
            return [f"{label}: {text}"]
        self.is_cut = True
        return [f"{label}: {text[:CUT]}… ({len(text)} characters)"]

    def traceback(self, text: str) -> list[str]:
        """Return the lines of a traceback, or the last of them."""
        lines = text.rstrip().splitlines()
        if self.is_full:
            return lines
        left_out = max(0, len(lines) - TRACEBACK_LINES)
        kept = [line if len(line) <= CUT else f"{line[:CUT]}…" for line in lines[left_out:]]
        self.is_cut = self.is_cut or kept != lines
        return [f"… ({left_out} lines before)", *kept] if left_out else kept

    def _conversation(self, call: ModelCall) -> list[str]:
        """Return a call's messages behind those that it has in common with an earlier call."""
        messages = call_messages(call)
        common = self._shown.add(messages)
        above = [f"({common} messages as above)"] if common else []
        return above + [
            line
            for message in messages[common:]
            for label, text in labelled_texts(message)
            for line in self.text(label, text)
        ]

    def _messages(self, span: Span) -> list[str]:
        """Return the messages that a framework reported with a call that was not recorded."""
        named = ((semconv.INPUT_MESSAGES, "input"), (semconv.OUTPUT_MESSAGES, "output"))
        given = [(label, span.attributes[name]) for name, label in named if name in span.attributes]
        return [line for label, value in given for line in self.text(label, value)]
