"""The contents of spans as labelled texts: messages, tool calls, results and tracebacks.

Everything here was written by agents, models and tools, and may have any shape and any length.
"""

from typing import Any

from agl.schemas import Record, Span, to_json
from agl_inspect.rollouts.conversations import ShownMessages, contents_of

CUT = 2000
"""Characters of a text that a rollout's page shows; the page of a span shows all of them, up to ``LONGEST``."""

LONGEST = 200_000


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
        repeated, texts = contents_of(span, self._shown)
        return repeated, [self.text(label, value, role=role) for role, label, value in texts]

    def text(self, label: str, value: Any, *, role: str = "") -> Text:
        """Return a labelled text; a value that is no text is written as JSON."""
        text = value if isinstance(value, str) else to_json(value).decode()
        return Text(label=label, text=text[: self._limit], role=role, length=len(text))
