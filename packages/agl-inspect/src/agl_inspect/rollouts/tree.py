"""Reduces the spans of an attempt to rows of a tree along a time axis, and makes their texts."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from agl import semconv
from agl.episodes import Enclosing
from agl.schemas import Record, Span, to_json
from agl_inspect.rollouts.conversations import ShownMessages, contents_of
from agl_inspect.rollouts.explanations import call_facts
from agl_inspect.rollouts.span_reader import in_tree

AXIS = 1000
"""The length of the time axis in units, from the first start to the last end."""

DEEPEST = 12
"""The most levels of indentation; deeper rows are indented as far as this level."""


CUT = 2000
"""The most characters of a text on a rollout's page; a span's page shows up to ``LONGEST``."""

LONGEST = 200_000


class Text(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A labelled text.

    Attributes:
        text: The start of the text.
        role: ``system``, ``user``, ``assistant``, ``tool``, ``error``, or ``""``.
        length: The number of characters of the whole text.
    """

    label: str
    text: str
    role: str = ""
    length: int = 0

    @property
    def is_cut(self) -> bool:
        """True if ``text`` is only the start of the text."""
        return self.length > len(self.text)


class Contents:
    """Makes the texts of spans in sequence, and remembers the messages that it has shown.

    Args:
        limit: The most characters of each text; ``None`` for whole texts.
    """

    def __init__(self, *, limit: int | None = CUT) -> None:
        self._limit = limit
        self.shown = ShownMessages()

    def of(self, span: Span) -> list[Text]:
        """Return the texts of a span, without messages that were shown before."""
        return [self.text(label, value, role=role) for role, label, value in contents_of(span, self.shown)[1]]

    def others(self, span: Span) -> list[Text]:
        """Return what a span recorded besides the messages of its call."""
        return self.of(span if span.call is None else replace(span, call=replace(span.call, request={}, response=None)))

    def text(self, label: str, value: Any, *, role: str = "") -> Text:
        """Return a labelled text; a value that is not a string is written as JSON."""
        text = value if isinstance(value, str) else to_json(value).decode()
        return Text(label=label, text=text[: self._limit], role=role, length=len(text))


class Node(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A row of the tree.

    Attributes:
        kind: ``call``, ``reward``, ``agent``, ``tool``, ``node``, ``workflow``, ``handoff`` or ``step``.
        agent: The innermost agent, node or role that encloses the span.
        path: Names of the enclosing agents, nodes and tools, outermost first.
        start: The start of the bar on the time axis.
        width: The length of the bar.
    """

    span_id: str
    sequence: int
    depth: int
    kind: str
    name: str
    agent: str
    path: list[str]
    start: int
    width: int
    seconds: float
    is_error: bool
    is_late: bool


def tree_of(spans: Sequence[Span]) -> list[Node]:
    """Return the spans as rows in display order: children below the parent, in the order of start times."""
    enclosing = Enclosing(spans)
    first, last = ends_of(spans)
    scale = AXIS / max(1, last - first)
    nodes: list[Node] = []
    for depth, span, _ in in_tree(spans):
        who = enclosing.who(span)
        start = round(max(0, span.start_ns - first) * scale) if span.start_ns else 0
        nodes.append(
            Node(
                span_id=span.span_id,
                sequence=span.sequence,
                depth=min(depth, DEEPEST),
                kind=kind_of(span),
                name=span.name,
                agent=who.agent,
                path=list(who.path),
                start=min(start, AXIS - 4),
                width=max(4, min(AXIS - start, round((span.end_ns - span.start_ns) * scale))),
                seconds=seconds_of(span),
                is_error=span.status == "error",
                is_late=span.is_late,
            )
        )
    return nodes


def ends_of(spans: Sequence[Span]) -> tuple[int, int]:
    """Return the ends of the time axis in nanoseconds; spans from after the attempt, such as ratings, do not count."""
    timed = [span for span in spans if span.attempt_id and not span.is_late] or spans
    first = min((span.start_ns for span in timed if span.start_ns), default=0)
    return first, max((max(span.start_ns, span.end_ns) for span in timed), default=first)


def kind_of(span: Span) -> str:
    """Return the kind of a span, as :attr:`Node.kind` lists them."""
    if span.call is not None:
        return "call"
    if span.reward is not None:
        return "reward"
    operation = str(span.attributes.get(semconv.OPERATION, ""))
    word = operation.rpartition("_")[2]
    return word if word in ("agent", "tool", "node", "workflow", "handoff") else "step"


def seconds_of(span: Span) -> float:
    """Return the duration of a span in seconds."""
    return max(0, span.end_ns - span.start_ns) / 1e9


def facts_of(span: Span) -> list[str]:
    """Return the facts of a model call or a hand-off as text."""
    target = span.attributes.get(semconv.HANDOFF_TARGET)
    if span.call is None:
        return [f"to {target}"] if target else []
    return call_facts(span)
