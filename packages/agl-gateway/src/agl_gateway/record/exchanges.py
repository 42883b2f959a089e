"""Describes a model call in the gateway: its context from the headers, its finished exchange, and its spans.

An exchange becomes one ``chat`` span per sampled choice, by the GenAI conventions.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from agl import semconv
from agl.contracts import Upstream
from agl.dialects import Exchange, Request, calls_of
from agl.schemas import Json, Span, new_trace_id
from agl.tracing import WHO_HEADER, chat_spans, decode_names
from agl_gateway.recent import Recent
from agl_gateway.relay.callers import HelperRules, Origin
from agl_gateway.traffic.arms import CallRoute, policy_of
from agl_gateway.wire.translation import Outgoing

_RETRY_MEMORY = 20_000
_MAX_CLIENT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class CallContext:
    """The attempt, request, trace and caller of a model call.

    Attributes:
        trace_id: The client's trace id; ``""`` if it sent none.
        parent_id: Span in which the call was made; ``None`` if unknown.
        framework_span_id: The value of the ``x-agl-span-id`` header.
        names: Names of the callers, innermost first, as the wire hook sends them.
        client: The client's ``user-agent``.
        origin: The coding agent that made the call, where no tracer says who did.
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
        """Names of the callers, innermost first: those of a tracer, else those of a coding agent."""
        return self.names or self.origin.names


@dataclass(kw_only=True, slots=True, eq=False)
class CallRecord:
    """One call as far as its stages have come; the recorder makes its spans once it has ended.

    Attributes:
        outgoing: What the policy's server gets.
        route: Where it goes; ``None`` before that is decided.
        model_version: The version that serves it.
        start_ns: Unix nanoseconds at the request's last byte.
        exchange: Request and response; ``None`` before its end.
        number: The recorder's number; 0 before its end.
    """

    context: CallContext
    outgoing: Outgoing
    route: CallRoute | None = None
    model_version: str = ""
    start_ns: int = field(default_factory=time.time_ns)
    started: float = field(default_factory=time.perf_counter)
    exchange: Exchange | None = None
    number: int = 0

    @property
    def attempt_id(self) -> str:
        """The attempt that it belongs to."""
        return self.context.attempt_id

    @property
    def upstream(self) -> Upstream:
        """The policy that it goes to; one without a name before that is decided."""
        return _NO_UPSTREAM if self.route is None else self.route.target.upstream

    def end(
        self, body: bytes, *, status: int, first_byte: float = 0.0, error: str = "", is_complete: bool = True
    ) -> None:
        """Complete the record with the plain bytes of the answer; ``first_byte`` is when a streamed one began."""
        latency_s = time.perf_counter() - self.started
        self.exchange = Exchange(
            request=self.outgoing.request,
            request_id=self.context.request_id,
            status=status,
            headers={},
            response=body,
            is_streamed=first_byte > 0.0,
            is_complete=is_complete,
            latency_s=latency_s,
            first_token_s=first_byte - self.started if first_byte else latency_s,
            retry_count=self.context.retry_count,
            error=error,
        )

    @property
    def size(self) -> int:
        """Bytes of the request and the response."""
        return len(self.outgoing.request.body) + (len(self.exchange.response) if self.exchange else 0)


_NO_UPSTREAM = Upstream(name="", base_url="")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKey:
    """What tells a repeated request from others: its attempt, and the size and digest of its body."""

    attempt_id: str
    size: int
    digest: str


@dataclass
class RequestIds:
    """Assigns one id to a request and all of its retries.

    A retry carries the same ``x-agl-request-id``, or the same body with a retry count above zero.
    """

    _recent: Recent[RequestKey, tuple[float, str]] = field(default_factory=lambda: Recent(_RETRY_MEMORY))

    def of(self, attempt_id: str, headers: Mapping[str, str], body: bytes) -> tuple[str, int]:
        """Return the request's id and the client's retry count."""
        retries = _count(headers.get("x-stainless-retry-count", "0"))
        if given := headers.get("x-agl-request-id", ""):
            return given[:128], retries
        key = _key(attempt_id, body)
        if retries and (known := self._recent.get(key)) is not None:
            return known[1], retries
        request_id = new_trace_id()
        self.learn(key, time.time(), request_id)
        return request_id, retries

    def retry_of(self, attempt_id: str, headers: Mapping[str, str], body: bytes) -> RequestKey | None:
        """Return the key of a repeated request, whose first try others may have got; ``None`` for any other."""
        if headers.get("x-stainless-retry-count", "0") == "0" or headers.get("x-agl-request-id", ""):
            return None
        return _key(attempt_id, body)

    def known(self, key: RequestKey) -> tuple[float, str]:
        """Return the Unix seconds and the id of the newest request with this key; 0 and ``""`` if there is none."""
        return self._recent.get(key, (0.0, ""))

    def learn(self, key: RequestKey, at: float, request_id: str) -> None:
        """Remember the id of a request that came at ``at`` Unix seconds."""
        self._recent[key] = (at, request_id)


def _key(attempt_id: str, body: bytes) -> RequestKey:
    return RequestKey(attempt_id=attempt_id, size=len(body), digest=blake2b(body, digest_size=8).hexdigest())


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 6 else 0


def trace_of(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return trace id and span id of a W3C ``traceparent`` header; both empty without a valid one."""
    parts = headers.get("traceparent", "").split("-")
    is_valid = len(parts) >= 4 and _is_hex(parts[1], 32) and _is_hex(parts[2], 16)
    return (parts[1], parts[2]) if is_valid else ("", "")


def _is_hex(text: str, size: int) -> bool:
    return len(text) == size and bool(text.strip("0")) and all(letter in "0123456789abcdef" for letter in text)


def span_id_of(headers: Mapping[str, str]) -> str:
    """Return the framework span's id from ``x-agl-span-id``; ``""`` unless it is 16 hex digits."""
    text = headers.get("x-agl-span-id", "").lower()
    return text if _is_hex(text, 16) else ""


def context_of(
    rollout_id: str,
    attempt_id: str,
    headers: Mapping[str, str],
    asked: Request,
    *,
    request_ids: RequestIds,
    helpers: HelperRules,
) -> CallContext:
    """Build the context of a request from its headers, and from its body where these show a coding agent."""
    request_id, retries = request_ids.of(attempt_id, headers, asked.body)
    trace_id, trace_parent = trace_of(headers)
    framework_span_id = span_id_of(headers)
    names = decode_names(headers.get(WHO_HEADER, ""))
    return CallContext(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        request_id=request_id,
        retry_count=retries,
        trace_id=trace_id,
        parent_id=framework_span_id or trace_parent or None,
        framework_span_id=framework_span_id,
        names=names,
        client=headers.get("user-agent", "")[:_MAX_CLIENT],
        origin=helpers.origin_of(headers, asked, has_tracer=bool(names or framework_span_id)),
    )


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
            exchange,
            policy=policy_of(record.upstream),
            model_version=record.model_version,
            want_ids=record.upstream.is_trained,
        ),
        rollout_id=context.rollout_id,
        attempt_id=context.attempt_id,
        trace_id=context.trace_id or _trace_id_of(context.attempt_id),
        parent_id=context.parent_id,
        framework_span_id=context.framework_span_id,
        start_ns=record.start_ns,
        end_ns=record.start_ns + int(exchange.latency_s * 1e9),
        about={key: value for key, value in about.items() if value},
    )


def _trace_id_of(attempt_id: str) -> str:
    """Return the trace id for an attempt whose client sent none; the same for all of its calls."""
    return blake2b(attempt_id.encode(), digest_size=16).hexdigest()
