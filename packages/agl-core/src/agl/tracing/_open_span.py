"""Spans of the work of agents, nodes, tools and model clients, opened when work begins and closed when it ends.

Tracers, :class:`agl.operation` and OpenTelemetry's spans are all recorded through this module. It applies the semantic
conventions, maintains the tree of spans, finds the actors, and ends spans that are never closed. No function raises
into the agent: failures are logged.
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypeAlias, TypedDict, Unpack
from urllib.parse import urlsplit

from agl import semconv
from agl._actors import NAMING
from agl.schemas import Json, Span, SpanEvent, SpanStatus, new_span_id
from agl.tracing._context import ActiveAttempt, current, enter, entered_spans, innermost, leave
from agl.tracing._span_values import error_fields, plain

_log = logging.getLogger(__name__)

_STILL_OPEN = "still open when the attempt ended"

Kind = Literal["internal", "client", "server", "producer", "consumer"]
Given: TypeAlias = Mapping[str, Json] | Callable[[], Mapping[str, Json]]


class About(TypedDict, total=False):
    """Keyword arguments that describe the subject of a span; :func:`open_span` explains them."""

    operation: Annotated[str | None, semconv.OPERATION]
    agent: Annotated[str | None, semconv.AGENT_NAME]
    agent_id: Annotated[str | None, semconv.AGENT_ID]
    node: Annotated[str | None, semconv.NODE]
    role: Annotated[str | None, semconv.ROLE]
    workflow: Annotated[str | None, semconv.WORKFLOW_NAME]
    tool: Annotated[str | None, semconv.TOOL_NAME]
    call_id: Annotated[str | None, semconv.TOOL_CALL_ID]
    arguments: Annotated[Any, semconv.TOOL_ARGUMENTS]
    result: Annotated[Any, semconv.TOOL_RESULT]
    model: Annotated[str | None, semconv.REQUEST_MODEL]
    provider: Annotated[str | None, semconv.PROVIDER]
    client: Annotated[str | None, semconv.CLIENT]
    server: Annotated[str | None, semconv.SERVER_ADDRESS]
    source: Annotated[str | None, semconv.HANDOFF_SOURCE]
    target: Annotated[str | None, semconv.HANDOFF_TARGET]
    conversation: Annotated[str | None, semconv.CONVERSATION_ID]


# The attribute of each key is in its annotation above.
_KEYS: dict[str, str] = {word: hint.__metadata__[0] for word, hint in About.__annotations__.items()}
_OPERATIONS = {
    semconv.REQUEST_MODEL: semconv.OP_CHAT,
    semconv.CLIENT: semconv.OP_CHAT,
    semconv.TOOL_NAME: semconv.OP_EXECUTE_TOOL,
    semconv.AGENT_NAME: semconv.OP_INVOKE_AGENT,
    semconv.WORKFLOW_NAME: semconv.OP_INVOKE_WORKFLOW,
    semconv.NODE: semconv.OP_INVOKE_NODE,
    semconv.HANDOFF_TARGET: semconv.OP_HANDOFF,
}
"""Maps attributes to the operation that each implies; of a span's attributes, the first in this order counts."""


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class OpenSpan:
    """A span that has begun, made by :func:`open_span`.

    Any thread or task may add to the span and close it; only the first :meth:`close` counts. While the span is open,
    :func:`agl.tracing.who` reads its names, and spans that are opened inside become its children. If the attempt ends
    first, the span is recorded as it is at that time, with an error that says so. Used as a context manager, the span
    ends with the block and records an exception that leaves the block.

    Attributes:
        span_id: 16 hex digits; ``""`` outside a rollout, where every method does nothing.
        parent_id: Id of the enclosing span.
        name: The whole name; ``""`` to derive the name from the span's subject.
        is_parent: Whether spans opened inside become children of this one.
        model_calls: Number of model calls that left while the span was entered.
    """

    attempt: ActiveAttempt | None = None
    span_id: str = ""
    parent_id: str = ""
    trace_id: str = ""
    name: str = ""
    kind: Kind = "internal"
    start_ns: int = 0
    since: int = 0
    attributes: Given | None = None
    is_parent: bool = True
    model_calls: int = 0
    _said: dict[str, Any] = field(default_factory=dict[str, Any], init=False)

    @property
    def is_open(self) -> bool:
        """True until the span or its attempt ends."""
        return self.attempt is not None and self.attempt.spans.get(self.span_id) is self

    def set(self, attributes: Mapping[str, Json] | None = None, /, **about: Unpack[About]) -> None:
        """Set attributes, and keys that describe the span's subject; ``None`` as a value removes a key.

        :func:`open_span` explains the keys.
        """
        if self.attempt is None:
            return
        try:
            said = self._said
            for word, value in about.items():
                # The host alone: a URL may carry a key in its path or query.
                found = urlsplit(str(value)).hostname if word == "server" and value else value
                if found is None:
                    said.pop(_KEYS[word], None)
                # "" stands for unknown; the number 0 does not.
                elif type(found) is not str or found:
                    said[_KEYS[word]] = plain(found)
            if attributes:
                self._said.update(plain(attributes))
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The span %r could not be described.", self.name)

    def close(
        self,
        error: BaseException | str | None = None,
        *,
        error_type: str = "",
        status: SpanStatus | None = None,
        end_ns: int | None = None,
        events: Sequence[SpanEvent] = (),
        **about: Unpack[About],
    ) -> None:
        """End the span and record it.

        Args:
            error: The exception or message with which the operation failed; ``GeneratorExit`` is not a failure.
            error_type: The type of an error that is given as a message.
            status: The status; by default ``error`` if there is an error, else ``ok``.
            end_ns: The end in Unix nanoseconds, by default now.
            events: Events within the span.
            about: Keys of the subject that are known only now, such as a tool's ``result``; see :func:`open_span`.
        """
        leave(self)
        # Whoever takes it first ends it; every later close, from any thread, does nothing.
        if self.attempt is None or self.attempt.spans.take(self.span_id) is not self:
            return
        if about:
            self.set(**about)
        ended: dict[str, Any] = {"status": "ok", "events": tuple(events)}
        # Closing a generator early is how readers stop, and no failure.
        if isinstance(error, BaseException) and not isinstance(error, GeneratorExit):
            ended = error_fields(error)
            error_type = type(error).__qualname__
        elif isinstance(error, str):
            ended |= {"status": "error", "status_message": plain(error)}
        if error_type:
            self._said[semconv.ERROR_TYPE] = error_type
        self._record(end_ns, ended if status is None else {**ended, "status": status})

    def abandon(self) -> None:
        """Record the span in its present state, because the attempt ends."""
        self._record(None, {"status": "error", "status_message": _STILL_OPEN})

    @contextmanager
    def entered(self) -> Generator[Self]:
        """Make this span the innermost one of the context in a ``with`` block; it stays open afterwards."""
        if self.attempt is not None:
            enter(self)
        try:
            yield self
        finally:
            leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error)

    def actor_attributes(self) -> tuple[Mapping[str, Any], str]:
        """Return the attributes that name actors, and the span's name if no semantic convention describes the span."""
        said, given = self._said, self._given()
        if given:
            # Only the names: attributes of foreign spans may be large.
            said = {**{key: given[key] for key in NAMING if key in given}, **said}
        is_plain = self.kind == "internal" and not self._operation(said)
        return said, self._full_name("") if is_plain else ""

    def _given(self) -> Mapping[str, Any] | None:
        try:
            # Read late, for frameworks fill attributes in while a span runs.
            return self.attributes() if callable(self.attributes) else self.attributes
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The attributes of the span %r could not be read.", self.name)
            return None

    def _operation(self, attributes: Mapping[str, Any]) -> str:
        """The span's operation, as set or as implied by another attribute; ``""`` if unknown."""
        if said := attributes.get(semconv.OPERATION, ""):
            return said
        subject = self._subject()
        return _OPERATIONS[subject] if subject else ""

    def _subject(self) -> str:
        """The key of the attribute that names the span's subject; ``""`` if the span has no such attribute."""
        said = self._said
        if said:
            for key in _OPERATIONS:
                if key in said:
                    return key
        return ""

    def _full_name(self, operation: str) -> str:
        if self.name:
            return self.name
        key = self._subject()
        subject = self._said[key] if key and key != semconv.CLIENT else ""
        return f"{operation} {subject}".strip() or "span"

    def _record(self, end_ns: int | None, ended: Mapping[str, Any]) -> None:
        attempt = self.attempt
        # A stand-in is dropped where a real record of the call exists.
        if attempt is None or not (self.is_parent or self._is_only_record()):
            return
        try:
            given = self._given()
            attributes: dict[str, Any] = plain(given) if given else {}
            attributes |= self._said
            operation = self._operation(attributes)
            span = Span(
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt_id,
                trace_id=self.trace_id or attempt.trace_id,
                span_id=self.span_id,
                parent_id=self.parent_id,
                name=self._full_name(operation),
                kind=self.kind,
                start_ns=self.start_ns,
                # The system's clock may be set back while a span is open.
                end_ns=max(self.start_ns, time.time_ns() if end_ns is None else end_ns),
                attributes={semconv.OPERATION: operation, **attributes} if operation else attributes,
                **ended,
            )
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The span %r could not be recorded.", self.name)
        else:
            attempt.add(span)

    def _is_only_record(self) -> bool:
        """True if no model call was recorded inside the span, which is then the only record of its client's call."""
        if self.model_calls:
            return False
        note_model_call()
        return True


_OUTSIDE = OpenSpan()
"""The span that code outside a rollout gets; its methods do nothing."""


def open_span(
    name: str = "",
    *,
    attempt: ActiveAttempt | None = None,
    parent: str | None = None,
    span_id: str = "",
    trace_id: str = "",
    kind: Kind = "internal",
    start_ns: int | None = None,
    attributes: Given | None = None,
    is_current: bool = True,
    unless_called: bool = False,
    **about: Unpack[About],
) -> OpenSpan:
    """Open a span of the current attempt; close it when its work ends.

    .. code-block:: python

        with open_span(tool="search", arguments={"q": "tides"}) as span:
            span.set(result=search("tides"))

    Args:
        name: The span's name; by default its operation and subject, such as ``execute_tool search``.
        attempt: The attempt of the span, by default the current one. Outside a rollout nothing is recorded, and opening
            costs next to nothing.
        parent: Id of the enclosing span, if the framework knows it; by default the innermost span of the context.
        span_id: The span's id, 16 hex digits, if it is known in advance.
        trace_id: The trace of a span that another system made; by default the attempt's.
        kind: OpenTelemetry's span kind.
        start_ns: The start in Unix nanoseconds; by default now.
        attributes: Further attributes as JSON values by name, or a function that returns them. They are read when the
            span ends; those that name actors are also read whenever actors are looked up.
        is_current: Whether spans that this context opens from now on become children of this one. Pass false if the
            tracer's ``current_span_id`` gets the current span from the framework, or if the span will be entered by
            :meth:`OpenSpan.entered`.
        unless_called: Whether the span only stands in for the record of a model call. Such a span encloses nothing, and
            is recorded only if no model call left while it was entered. For clients that may bypass the wire hook.
        about: The span's subject; ``None`` and ``""`` stand for unknown values.
            ``agent`` (with ``agent_id``), ``node`` (of a graph; a task or step), ``role`` (the part that an agent
            plays) and ``workflow`` (a graph, crew or team) name the actors.
            ``tool`` is called, by ``call_id``, with ``arguments``, and returns a ``result``.
            ``model`` of a ``provider`` is called through ``client`` (a class) at ``server`` (a URL; only its host is
            recorded). The call itself is recorded on the wire.
            ``source`` and ``target`` are the agents of a hand-off. ``conversation`` is the program's id of one.
            ``operation`` names the operation if it does not follow from the other keys.
    """
    attempt = attempt or current()
    if attempt is None:
        return _OUTSIDE
    try:
        parent = parent or innermost(attempt)  # before the clock is read: the enclosing span must begin first
        # Two clocks: the first is shown and stored, the second orders spans within the process and
        # never goes back.
        now, since = time.time_ns(), time.perf_counter_ns()
        opened = OpenSpan(
            attempt=attempt,
            span_id=span_id or new_span_id(),
            parent_id=parent,
            trace_id=trace_id,
            name=name,
            kind=kind,
            start_ns=now if start_ns is None else start_ns,
            # A start in the past on the clock is a start in the past here as well.
            since=since if start_ns is None else since - (now - start_ns),
            attributes=attributes,
            is_parent=not unless_called,
        )
        if about:
            opened.set(**about)
        attempt.spans.add(opened.span_id, opened)
        if is_current:
            enter(opened)
        return opened
    except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
        _log.exception("The span %r could not be opened.", name)
        return _OUTSIDE


def current_span() -> OpenSpan:
    """The innermost open span around the running code, to add attributes to.

    If only the attempt's root is open, returns a span whose methods do nothing.
    """
    attempt = current()
    found = None if attempt is None else attempt.spans.get(innermost(attempt))
    return found if isinstance(found, OpenSpan) else _OUTSIDE


async def stepped(open_: Callable[[], OpenSpan], items: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """Yield ``items``, and enter a span while each item is produced.

    Between two items the span is left, because the reader of a generator runs in the same context.

    Args:
        open_: Opens the span, with ``is_current=False``; called when the first item is requested.
        items: The items; an iterator with ``aclose`` is closed at the end.
    """
    closed: Any = items
    async with aclosing(closed) if hasattr(items, "aclose") else nullcontext():
        with open_() as span:
            while True:
                # Entered for each item alone: between two items the reader runs, in the same
                # context and outside of this span.
                with span.entered():
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item


def note_model_call() -> None:
    """Count a model call for every span that this context has entered.

    The wire hook calls this when a call leaves. A tracer calls it if its framework reports a model call in a span of
    the framework, so that no span opened with ``unless_called`` reports the same call again.
    """
    found = entered_spans()
    while found is not None:
        # Every enclosing span, because a stand-in may stand around several others.
        found[0].model_calls += 1
        found = found[1]
