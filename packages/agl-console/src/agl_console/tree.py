"""The spans of an attempt as a tree along a time axis."""

from collections.abc import Mapping, Sequence
from typing import Any

from agl import semconv
from agl.episodes import Enclosing
from agl.schemas import Record, Reward, Span, Transition, to_json
from agl_inspect.rollouts.conversations import ShownMessages, contents_of
from agl_inspect.rollouts.explanations import call_facts
from agl_inspect.rollouts.span_reader import in_tree

AXIS = 1000
"""Units of the time axis, from the first start to the last end."""

DEEPEST = 12
"""Levels by which rows are indented; deeper ones stand below each other."""


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


class Node(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A row of the tree.

    Attributes:
        kind: ``call``, ``reward``, ``agent``, ``tool``, ``node``, ``workflow``, ``handoff`` or ``step``.
        agent: The nearest agent, node or role around it.
        start: Where its bar begins on the axis; ``width`` how long it is.
        facts: What else is known, in words: model, version, tokens, finish reason.
        fate: Where a call went: ``row 0 at 12``, or the reason for its rejection; ``""`` for other spans.
        is_rejected: Whether the call reaches no row.
        repeated: Messages of the call that rows above show.
    """

    span_id: str
    sequence: int
    depth: int
    kind: str
    name: str
    agent: str
    start: int
    width: int
    seconds: float
    is_error: bool
    is_late: bool
    message: str
    facts: list[str]
    reward: Reward | None
    fate: str
    is_rejected: bool
    repeated: int
    texts: list[Text]


def tree_of(spans: Sequence[Span], transitions: Mapping[str, Transition]) -> list[Node]:
    """Return the spans as rows in order: children below their parent, in order of start."""
    enclosing, contents = Enclosing(spans), Contents()
    first = min((span.start_ns for span in spans if span.start_ns), default=0)
    last = max((max(span.start_ns, span.end_ns) for span in spans), default=0)
    scale = AXIS / max(1, last - first)
    nodes: list[Node] = []
    for depth, span, _ in in_tree(spans):
        start = round(max(0, span.start_ns - first) * scale) if span.start_ns else 0
        repeated, texts = contents.of(span)
        transition = transitions.get(span.span_id)
        nodes.append(
            Node(
                span_id=span.span_id,
                sequence=span.sequence,
                depth=min(depth, DEEPEST),
                kind=kind_of(span),
                name=span.name,
                agent=enclosing.who(span).agent,
                start=min(start, AXIS - 4),
                width=max(4, min(AXIS - start, round((span.end_ns - span.start_ns) * scale))),
                seconds=seconds_of(span),
                is_error=span.status == "error",
                is_late=span.is_late,
                message=span.status_message,
                facts=facts_of(span),
                reward=span.reward,
                fate=fate_of(transition),
                is_rejected=transition is not None and bool(transition.reject),
                repeated=repeated,
                texts=texts,
            )
        )
    return nodes


def kind_of(span: Span) -> str:
    """Return the kind of a span in one word."""
    if span.call is not None:
        return "call"
    if span.reward is not None:
        return "reward"
    operation = str(span.attributes.get(semconv.OPERATION, ""))
    word = operation.rpartition("_")[2]
    return word if word in ("agent", "tool", "node", "workflow", "handoff") else "step"


def seconds_of(span: Span) -> float:
    """Return how long a span took."""
    return max(0, span.end_ns - span.start_ns) / 1e9


def facts_of(span: Span) -> list[str]:
    """Return what is known of a model call or of a hand-off, in words."""
    target = span.attributes.get(semconv.HANDOFF_TARGET)
    if span.call is None:
        return [f"to {target}"] if target else []
    return call_facts(span)


def fate_of(transition: Transition | None) -> str:
    """Tell where a call went: its row and place, or the reason for its rejection."""
    if transition is None:
        return ""
    if transition.reject:
        return f"rejected, {transition.reject}: {transition.detail}"
    own = f", own reward {transition.reward:g}" if transition.reward is not None else ""
    return f"row {transition.branch} at {transition.start}{own}"
