"""The contents of spans as labelled texts: messages, tool calls, results and tracebacks.

Everything here was written by agents, models and tools, and may have any shape and any length.
"""

from typing import Any

from agl import semconv
from agl.dialects import call_messages
from agl.schemas import ModelCall, Record, Span, to_json
from agl_inspect.rollouts import ShownMessages, labelled_texts

CUT = 2000
"""Characters of a text that a rollout's page shows; the page of a span shows all of them, up to ``LONGEST``."""

LONGEST = 200_000

_LABELS = {
    semconv.TOOL_ARGUMENTS: "arguments",
    semconv.TOOL_RESULT: "result",
    semconv.MESSAGE: "message",
    semconv.OBJECT: "object",
    semconv.OBSERVATION_CONTENT: "says",
    semconv.OUTPUT: "returned",
    semconv.INPUT_MESSAGES: "input",
    semconv.OUTPUT_MESSAGES: "output",
}


class Text(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A labelled text.

    Attributes:
        role: ``system``, ``user``, ``assistant``, ``tool``, ``error``, or ``""``.
        length: Characters of the whole text, of which ``text`` is the beginning.
    """

    label: str
    text: str
    role: str = ""
    length: int = 0

    @property
    def is_cut(self) -> bool:
        """True if the text is longer than what is here."""
        return self.length > len(self.text)


class Contents:
    """Makes the texts of spans, one after the other; messages that an earlier call has shown are not repeated.

    Args:
        limit: Characters at most of each text.
    """

    def __init__(self, *, limit: int = CUT) -> None:
        self._limit = limit
        self._shown = ShownMessages()

    def of(self, span: Span) -> tuple[int, list[Text]]:
        """Return how many messages were shown before, and the texts."""
        texts = [self.text(label, span.attributes[name]) for name, label in _LABELS.items() if name in span.attributes]
        repeated, messages = (0, []) if span.call is None else self._conversation(span.call)
        texts += messages
        if span.reward is not None and span.reward.feedback:
            texts.append(self.text("feedback", span.reward.feedback))
        for event in span.events:
            if "exception.stacktrace" in event.attributes:
                texts.append(self.text("traceback", event.attributes["exception.stacktrace"], role="error"))
        return repeated, texts

    def text(self, label: str, value: Any, *, role: str = "") -> Text:
        """Return a labelled text; a value that is no text is written as JSON."""
        text = value if isinstance(value, str) else to_json(value).decode()
        return Text(label=label, text=text[: self._limit], role=role, length=len(text))

    def _conversation(self, call: ModelCall) -> tuple[int, list[Text]]:
        messages = call_messages(call)
        common = self._shown.add(messages)
        return common, [
            self.text(label, text, role=str(message.get("role", "message")))
            for message in messages[common:]
            for label, text in labelled_texts(message)
        ]
