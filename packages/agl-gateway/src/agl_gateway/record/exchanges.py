"""Describes a model call in the gateway: the context from its headers, the finished exchange, and the spans.

An exchange becomes one ``chat`` span per sampled choice, following OpenTelemetry's GenAI conventions.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from agl import semconv
from agl.contracts import Upstream
from agl.dialects import Exchange, calls_of
from agl.schemas import Json, Span
from agl.tracing import chat_spans
from agl_gateway.traffic.arms import CallRoute, policy_of
from agl_gateway.wire.translation import Outgoing


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The program that made a call, as far as the request shows it.

    Attributes:
        agent: The coding agent's name, followed by a slash and its sub-agent's name if there is one; ``""`` if unknown.
        agent_id: The id of the sub-agent.
        session: The id of the agent's session.
        role: The call's role: :data:`agl.semconv.HELPER` for a helper call, ``compaction`` for a call that shortens the
            conversation (and is trained on), ``""`` for a turn.
    """

    agent: str = ""
    agent_id: str = ""
    session: str = ""
    role: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which policies select their callers, innermost first."""
        return tuple(name for name in (self.role, self.agent) if name)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallContext:
    """The attempt, request, trace and caller of a model call.

    Attributes:
        trace_id: The client's trace id; ``""`` if it sent none.
        parent_id: The span in which the call was made; ``None`` if unknown.
        framework_span_id: The value of the ``x-agl-span-id`` header.
        names: Names of the callers, innermost first, as the wire hook sends them.
        client: The client's ``user-agent``.
        origin: The coding agent that made the call; used if no tracer names the caller.
    """

    rollout_id: str
    attempt_id: str
    request_id: str
    retry_count: int
    trace_id: str = ""
    parent_id: str | None = None
    framework_span_id: str = ""
    names: tuple[str, ...] = ()
    client: str = ""
    origin: Origin = field(default_factory=Origin)

    @property
    def callers(self) -> tuple[str, ...]:
        """Names of the callers, innermost first: the tracer's names if there are any, else the coding agent's names."""
        return self.names or self.origin.names


@dataclass(kw_only=True, slots=True, eq=False)
class CallRecord:
    """The record of one call, filled in stage by stage; the recorder makes its spans once the call has ended.

    Attributes:
        outgoing: The request as the policy's server gets it.
        route: The destination; ``None`` until it is decided.
        model_version: The version that serves the call.
        start_ns: Unix nanoseconds at the request's last byte.
        exchange: The request and how it ended; ``None`` until the call has ended, and again once its spans are made.
        parts: The response, as it arrived: joining a large one takes the recorder's thread, not the event loop's.
        size: Total bytes of the call's request and response, once it has ended.
        number: The recorder's number for the call; 0 until the call has ended.
    """

    context: CallContext
    outgoing: Outgoing
    route: CallRoute | None = None
    model_version: str = ""
    start_ns: int = field(default_factory=time.time_ns)
    started: float = field(default_factory=time.perf_counter)
    exchange: Exchange | None = None
    parts: Sequence[bytes] = ()
    size: int = 0
    number: int = 0

    @property
    def attempt_id(self) -> str:
        """The attempt that the call belongs to."""
        return self.context.attempt_id

    @property
    def upstream(self) -> Upstream:
        """The upstream that the call goes to; an upstream with an empty name until the route is decided."""
        return _NO_UPSTREAM if self.route is None else self.route.target.upstream

    def end(
        self, parts: Sequence[bytes], *, status: int, first_byte: float = 0.0, error: str = "", is_complete: bool = True
    ) -> None:
        """Complete the record with the response.

        Args:
            parts: The decompressed bytes of the response.
            first_byte: When a streamed response began, by :func:`time.perf_counter`; 0 for a response that is not
                streamed.
        """
        latency_s = time.perf_counter() - self.started
        self.parts = parts
        self.size = len(self.outgoing.request.body) + sum(map(len, parts))
        self.exchange = Exchange(
            request=self.outgoing.request,
            request_id=self.context.request_id,
            status=status,
            is_streamed=first_byte > 0.0,
            is_complete=is_complete,
            latency_s=latency_s,
            first_token_s=first_byte - self.started if first_byte else latency_s,
            retry_count=self.context.retry_count,
            error=error,
        )


_NO_UPSTREAM = Upstream(name="", base_url="")


def spans_of(record: CallRecord) -> list[Span]:
    """Return the spans of a call that has ended, one per choice."""
    context, exchange = record.context, record.exchange
    if exchange is None:
        raise AssertionError("a call is recorded once it has ended")
    about: dict[str, Json] = {
        semconv.CALLER: list(context.names),
        semconv.AGENT_NAME: context.origin.agent,
        semconv.AGENT_ID: context.origin.agent_id,
        semconv.CONVERSATION_ID: context.origin.session,
        semconv.ROLE: context.origin.role,
        semconv.USER_AGENT: context.client,
        semconv.SPLIT_ARM: record.route.arm if record.route else "",
        **record.outgoing.notes,
    }
    return chat_spans(
        calls_of(
            msgspec.structs.replace(exchange, response=b"".join(record.parts)),
            policy=policy_of(record.upstream),
            model_version=record.model_version,
            want_ids=record.upstream.is_trained,
        ),
        rollout_id=context.rollout_id,
        attempt_id=context.attempt_id,
        # A client that sends no trace id gets one id for all calls of its attempt.
        trace_id=context.trace_id or blake2b(context.attempt_id.encode(), digest_size=16).hexdigest(),
        parent_id=context.parent_id,
        framework_span_id=context.framework_span_id,
        start_ns=record.start_ns,
        end_ns=record.start_ns + int(exchange.latency_s * 1e9),
        about={key: value for key, value in about.items() if value},
    )
