"""The wire hook, which observes model calls that leave through ``httpx`` or ``httpx2`` inside a rollout.

If there is a gateway, calls for a configured policy are redirected to it with the attempt's identity, even from clients
that were built long before the run, and the gateway records them. Without a gateway the hook records them, streamed or
not. Calls to other models are not redirected; the hook records them while a :class:`WireTracer` is installed.

Only ``send`` of the two modules' clients is wrapped. Clients of other libraries are recorded by the gateway or not at
all. The hook's own failures are logged and leave the request unchanged; the client's exceptions pass through.
Requests are ``httpx.Request`` or ``httpx2.Request``; both modules are optional, so neither is named in a type.
"""

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

import msgspec

from agl import semconv
from agl.contracts import CannedAnswer, Tracer, Upstream
from agl.dialects import Request, dialect_of, sampled
from agl.dialects._exchange import ENDPOINTS
from agl.errors import describe
from agl.schemas._ids import new_span_id
from agl.tracing._caller import who_within
from agl.tracing._context import ActiveAttempt, current, innermost
from agl.tracing._import_watch import ImportWatch
from agl.tracing._open_span import note_model_call
from agl.tracing._patches import Undo, patch
from agl.tracing._routing import WHO_HEADER, encode_names, is_same_host, upstreams_for
from agl.tracing._wire.open_call import OpenCall, Tee

_log = logging.getLogger(__name__)

_MODULES = ("httpx", "httpx2")
# By name: the classes belong to httpx or httpx2, neither of which is imported here.
_NO_CONNECTION = ("ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol")


class WireTracer(Tracer):
    """Records a rollout's calls to models that no policy of the experiment serves.

    Without a gateway such calls are recorded even without this tracer. With a gateway, which never sees them, they are
    recorded only while the tracer is installed. The tracer names no current span.
    """

    _installed: ClassVar[set["WireTracer"]] = set()

    @classmethod
    def is_on(cls) -> bool:
        """True if any tracer of this class is installed in the process."""
        return bool(cls._installed)

    def install(self) -> None:
        """Start recording such calls; idempotent."""
        self._installed.add(self)

    def uninstall(self) -> None:
        """Stop recording; calls in flight are still recorded."""
        self._installed.discard(self)


def install() -> Undo:
    """Wrap the HTTP clients that are imported now or later; the returned function restores the originals."""
    undo: list[Undo] = []
    watch = ImportWatch(_MODULES, lambda module: undo.extend(_wrap(module)))
    watch.start()

    def revert() -> None:
        watch.stop()
        while undo:
            undo.pop()()

    return revert


def _wrap(module: ModuleType) -> list[Undo]:
    def send(original: Any) -> Any:
        # A class of the client's own module, because httpx checks streams by isinstance.
        return _send(original, type("Tee", (Tee, module.SyncByteStream), {}), module.Response)

    def send_async(original: Any) -> Any:
        return _send_async(original, type("Tee", (Tee, module.AsyncByteStream), {}), module.Response)

    return [patch(module.Client, "send", send), patch(module.AsyncClient, "send", send_async)]


def _send(original: Callable[..., Any], tee: Any, answer: Any) -> Callable[..., Any]:
    @wraps(original)
    def send(self: Any, request: Any, **options: Any) -> Any:
        watched = _watched(request, options, answer)
        if watched is None:
            return original(self, request, **options)
        with watched as found:
            response = original(self, found.request, **found.options) if found.canned is None else found.canned
        return watched.with_response(response, tee)

    return send


def _send_async(original: Callable[..., Any], tee: Any, answer: Any) -> Callable[..., Any]:
    @wraps(original)
    async def send(self: Any, request: Any, **options: Any) -> Any:
        watched = _watched(request, options, answer)
        if watched is None:
            return await original(self, request, **options)
        with watched as found:
            response = await original(self, found.request, **found.options) if found.canned is None else found.canned
        return watched.with_response(response, tee)

    return send


_IS_SENDING: ContextVar[bool] = ContextVar("agl_is_sending", default=False)
"""True within a wrapped ``send``, so that a request which one client hands to another is recorded only once."""


@dataclass(kw_only=True)
class _WatchedRequest:
    """A request of a rollout; enter it as a context while it is in flight.

    Attributes:
        given: The client's own request.
        request: The request that is sent in place of ``given``.
        options: The options with which ``request`` is sent.
        call: The record of a model call, ``None`` for any other request.
        is_recorded_here: Whether the call is recorded in this process and not by the gateway.
        canned: A responder's prepared response, in which case the request is not sent; otherwise ``None``.
    """

    given: Any
    request: Any
    options: dict[str, Any]
    call: OpenCall | None
    is_recorded_here: bool
    canned: Any = None
    outer: Token[bool] | None = None

    def __enter__(self) -> Self:
        self.outer = _IS_SENDING.set(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.outer is not None:
            _IS_SENDING.reset(self.outer)
        if error is None or self.call is None:
            return
        # The gateway was never reached, so nobody else can have recorded the call.
        if self.is_recorded_here or type(error).__name__ in _NO_CONNECTION:
            self.call.finish(is_complete=False, error=describe(error))
        else:  # the gateway was reached, and has recorded the call
            self.call.discard()

    def with_response(self, response: Any, tee: Any) -> Any:
        """Return the response for the agent; its bytes are also copied to the call's record as the agent reads them."""
        try:
            response.request = self.given  # the copy that was sent carries the attempt's token
            if self.call is not None and not self.is_recorded_here:
                self.call.discard()
            elif self.call is not None:
                self.call.answered(response)
                # A client that does not stream has read the body by now.
                if response.is_stream_consumed or response.is_closed:
                    self.call.finish(is_complete=True, body=response.content)
                else:
                    response.stream = tee(response.stream, self.call)
        except Exception:  # noqa: BLE001  # isolation point: the agent gets its response
            _log.exception("The answer to %s could not be observed.", self.given.url)
        return response


def _watched(request: Any, options: dict[str, Any], answer: Any) -> _WatchedRequest | None:
    attempt = current()
    if attempt is None or _IS_SENDING.get():
        return None
    try:
        return _prepare(attempt, request, options, answer)
    except Exception:  # noqa: BLE001  # isolation point: the agent's request goes out as it was
        _log.exception("A request to %s could not be observed; it goes out unchanged.", request.url.host)
        return None


def _prepare(attempt: ActiveAttempt, request: Any, options: dict[str, Any], answer: Any) -> _WatchedRequest | None:
    url, content = str(request.url), _content_of(request)
    call = _call_of(request, content)
    if call is None and not is_below(url, attempt.gateway_url):
        return None
    parent_id = innermost(attempt)
    names = _caller_names(attempt, call, parent_id)
    route = route_of(attempt, call, url=url, names=names)
    # With a gateway, calls that do not go to it are other models' business, unless the user asked
    # for them.
    if route is None or (route.target == "record" and attempt.gateway_url and not WireTracer.is_on()):
        return None
    canned = _canned_answer(attempt, call, parent_id)
    if canned is not None:
        # No policy answered, and the record says what did: the version of the recording.
        no_policy = Upstream(name="", base_url="", model_version=canned.model_version)
        route = Route(target="record", url=url, upstream=no_policy)
    headers = [(name.lower(), value) for name, value in request.headers.raw]
    retries = _retry_count_of(named := dict(headers))
    request_id = _request_id_of(named, content or b"", retries)
    opened = None
    # A request that is not a model call may still go to the gateway, such as a reward; it needs the
    # token and no record.
    if call is not None:
        note_model_call()
        asked, notes = sampled(call, route.upstream.sampling if route.upstream and route.wants_ids else "")
        about = {semconv.CALLER: list(names), semconv.USER_AGENT: named.get(b"user-agent", b"").decode("latin-1")}
        opened = OpenCall(
            attempt=attempt,
            request=asked,
            upstream=route.upstream,
            wants_ids=route.wants_ids,
            parent_id=parent_id,
            request_id=request_id,
            retry_count=retries,
            about={key: value for key, value in about.items() if value} | notes,
        )
    sent, is_recorded_here = request, route.target == "record"
    if not is_recorded_here:
        rewritten = _gateway_headers(attempt, headers, parent_id=parent_id, request_id=request_id, names=names)
        sent = _copy_request(request, route.url, headers=rewritten, body=content)
        # The token is the only credential, and a redirect must not carry it to another server.
        options = {**options, "auth": None, "follow_redirects": False}
    elif opened is not None:
        sent = _recorded_request(request, opened.request, wants_ids=route.wants_ids)
    response = None
    if canned is not None:
        head = {"content-type": canned.content_type}
        response = answer(canned.status, headers=head, content=canned.body, request=request)
        response.elapsed = timedelta()
    return _WatchedRequest(
        given=request, request=sent, options=options, call=opened, is_recorded_here=is_recorded_here, canned=response
    )


def _caller_names(attempt: ActiveAttempt, call: Request | None, span_id: str) -> tuple[str, ...]:
    """The caller's names; empty if no policy has ``agents``, because looking the names up takes time."""
    if call is None or not any(upstream.agents for upstream in attempt.upstreams):
        return ()
    return who_within(attempt, span_id).names


def _canned_answer(attempt: ActiveAttempt, call: Request | None, span_id: str) -> CannedAnswer | None:
    """The responder's answer to a call; ``None`` if a model has to answer it."""
    if attempt.responder is None or call is None:
        return None
    return attempt.responder.respond(call, agent=who_within(attempt, span_id).agent)


_Headers: TypeAlias = list[tuple[bytes, bytes]]

# Of OpenAI, Anthropic, Azure and Google. A provider's key must not reach the gateway's log, and the
# token takes its place.
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie"})
# Written anew: the host is another, and the trace context is the attempt's.
_ROUTE_HEADERS = frozenset(
    {b"host", b"traceparent", b"tracestate", b"x-agl-span-id", b"x-agl-request-id", WHO_HEADER.encode()}
)
_DROPPED = _KEY_HEADERS | _ROUTE_HEADERS


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The target of a request.

    Attributes:
        target: ``gateway`` if the request goes to the gateway, with the attempt's ids and token, and is recorded there;
            ``record`` if it goes to its own URL and is recorded in this process.
        url: The URL to call: the gateway's if the request is redirected, otherwise the request's own.
        upstream: The policy that the call is for; ``None`` for models that no configured policy serves.
        wants_ids: Whether the body should request token ids, because the call goes to the server of a trained policy.
    """

    target: Literal["gateway", "record"]
    url: str
    upstream: Upstream | None = None
    wants_ids: bool = False


def route_of(attempt: ActiveAttempt, call: Request | None, *, url: str, names: Sequence[str] = ()) -> Route | None:
    """Return the route of a request; ``None`` if the request is neither redirected nor recorded.

    Args:
        attempt: The attempt.
        call: The model call that the request makes; ``None`` for another request, or if its body is not in memory. A
            request without a call has a route only if its URL is the gateway's.
        url: The request's URL.
        names: The caller's names, innermost first; used to choose a policy if there is a gateway.
    """
    if is_below(url, attempt.gateway_url):
        return Route(target="gateway", url=url)
    # Chat services, mail and MCP have routes that end like a model's; what agents send to people is not recorded. A
    # model call names its model, or goes to a server of a policy.
    if call is None or not (call.model or (call.is_object and _is_served(url, attempt.upstreams))):
        return None
    # Without a gateway a call cannot be sent elsewhere, so names choose nothing.
    chosen_by = names if attempt.gateway_url else ()
    found = upstreams_for(attempt.upstreams, dialect=call.dialect, model=call.model, names=chosen_by, url=url)
    upstream = found[0] if len(found) == 1 else None
    if found and attempt.gateway_url:  # the gateway refuses the call if several policies match
        query = urlsplit(url).query
        target = f"{attempt.gateway_url.rstrip('/')}/v1{ENDPOINTS[call.dialect]}" + (f"?{query}" if query else "")
        return Route(target="gateway", url=target, upstream=upstream)
    wants_ids = upstream is not None and upstream.is_trained and is_same_host(url, upstream.base_url)
    return Route(target="record", url=url, upstream=upstream, wants_ids=wants_ids)


def _is_served(url: str, upstreams: Sequence[Upstream]) -> bool:
    return any(
        is_same_host(url, server) for upstream in upstreams for server in (upstream.base_url, *upstream.replicas)
    )


def is_below(url: str, root: str) -> bool:
    """True if ``url`` is ``root``, or a path or query below ``root`` on the same host and port."""
    root = root.rstrip("/")
    # http://host:80 must not match http://host:8000.
    return bool(root) and (url == root or url.startswith((root + "/", root + "?")))


def _content_of(request: Any) -> bytes | None:
    """The request's body if it is in memory; ``None`` if it is generated while it is sent."""
    try:
        return request.content
    except Exception as error:  # the exception's class belongs to the client's module
        if type(error).__name__ != "RequestNotRead":
            raise
        return None


def _call_of(request: Any, content: bytes | None) -> Request | None:
    """The model call that a request makes; ``None`` for any other request, or if its body is not in memory."""
    dialect = dialect_of(request.url.path) if request.method == "POST" and content is not None else None
    return None if dialect is None or content is None else Request(dialect, content)


def _recorded_request(request: Any, call: Request, *, wants_ids: bool) -> Any:
    """Return the request with a body that asks for token ids if wanted; the same object if nothing changes."""
    body = call.prepared(want_ids=wants_ids)
    if body == request.content:
        return request
    headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
    return _copy_request(request, str(request.url), headers=headers, body=body)


def _gateway_headers(
    attempt: ActiveAttempt, given: _Headers, *, parent_id: str, request_id: str, names: Sequence[str] = ()
) -> _Headers:
    """Return the request's headers with the attempt's token and ids in place of the client's credentials.

    ``names`` are the caller's names, innermost first.
    """
    headers = [(name, value) for name, value in given if name not in _DROPPED]
    if attempt.token:
        token = attempt.token.encode()
        # Anthropic's clients send x-api-key; the gateway answers in the way that it was asked.
        has_key = any(name == b"x-api-key" for name, _ in given)
        headers.append((b"x-api-key", token) if has_key else (b"authorization", b"Bearer " + token))
    headers.append((b"traceparent", f"00-{attempt.trace_id}-{parent_id}-01".encode()))
    headers.append((b"x-agl-span-id", parent_id.encode()))
    headers.append((b"x-agl-request-id", request_id.encode()))
    if names:
        headers.append((WHO_HEADER.encode(), encode_names(names).encode()))
    return headers


def _copy_request(request: Any, url: str, *, headers: _Headers, body: bytes | None) -> Any:
    """Copy ``request`` with another URL and headers; if ``body`` is ``None``, the copy shares the request's stream."""
    content = {"stream": request.stream} if body is None else {"content": body}
    return type(request)(request.method, url, headers=headers, extensions=request.extensions, **content)


# A context variable, because concurrent calls of one client retry independently.
_RETRIED: ContextVar[tuple[int, str]] = ContextVar("agl_retried", default=(0, ""))


def _request_id_of(headers: dict[bytes, bytes], body: bytes, retries: int) -> str:
    """The id of a request: from its header, or from the first try if it is a retry, or else a new id.

    A retry is recognised by its body: clients retry in the task or thread of the first try, with the same body.
    """
    given = headers.get(b"x-agl-request-id")
    if given:
        return given.decode("ascii", "replace")
    digest, previous = _RETRIED.get()
    # Compared with the previous body of this context only; a collision would have to be the very
    # next call.
    found = hash(body)
    if retries and previous and digest == found:
        return previous
    request_id = f"rq-{new_span_id()}"
    _RETRIED.set((found, request_id))
    return request_id


def _retry_count_of(headers: dict[bytes, bytes]) -> int:
    """The client's own count of earlier tries; 0 for clients that do not count."""
    text = headers.get(b"x-stainless-retry-count", b"0")
    return int(text) if text.isdigit() else 0
