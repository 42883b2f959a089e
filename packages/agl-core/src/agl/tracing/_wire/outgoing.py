"""Routes requests that leave a client inside a rollout, and rewrites copies of them.

Requests are ``httpx.Request`` or ``httpx2.Request``; both modules are optional, so neither is named in a type.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from agl.contracts import Upstream
from agl.dialects import Request, dialect_of
from agl.dialects._exchange import ENDPOINTS
from agl.schemas._ids import new_span_id
from agl.tracing._context import ActiveAttempt
from agl.tracing._routing import WHO_HEADER, encode_names, is_same_host, upstreams_for

Headers: TypeAlias = list[tuple[bytes, bytes]]

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
        target: ``gateway`` if the request goes to the gateway, with the attempt's identity, and is recorded there;
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
    """The route of a request; ``None`` if the request is neither redirected nor recorded.

    Args:
        attempt: The attempt.
        call: The model call that the request makes; ``None`` if it makes none, or if its body is not in memory. A
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
    """True if ``url`` is ``root`` or a path or query below it, on the same host and port."""
    root = root.rstrip("/")
    # http://host:80 must not match http://host:8000.
    return bool(root) and (url == root or url.startswith((root + "/", root + "?")))


def content_of(request: Any) -> bytes | None:
    """The request's body if it is in memory; ``None`` if it is generated while it is sent."""
    try:
        return request.content
    except Exception as error:  # the exception's class belongs to the client's module
        if type(error).__name__ != "RequestNotRead":
            raise
        return None


def call_of(request: Any, content: bytes | None) -> Request | None:
    """The model call that a client's request makes; ``None`` for other requests and without a body in memory."""
    dialect = dialect_of(request.url.path) if request.method == "POST" and content is not None else None
    return None if dialect is None or content is None else Request(dialect, content)


def recorded_request(request: Any, call: Request, *, wants_ids: bool) -> Any:
    """The request with the body of ``call``, which asks for token ids if wanted; the same object if nothing changes."""
    body = call.prepared(want_ids=wants_ids)
    if body == request.content:
        return request
    headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
    return copy_request(request, str(request.url), headers=headers, body=body)


def gateway_headers(
    attempt: ActiveAttempt, given: Headers, *, parent_id: str, request_id: str, names: Sequence[str] = ()
) -> Headers:
    """The request's headers with the attempt's identity in place of the client's credentials.

    ``names`` are the caller's, innermost first.
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


def copy_request(request: Any, url: str, *, headers: Headers, body: bytes | None) -> Any:
    """A copy of ``request`` with another URL and headers; if ``body`` is ``None``, it shares the request's stream."""
    content = {"stream": request.stream} if body is None else {"content": body}
    return type(request)(request.method, url, headers=headers, extensions=request.extensions, **content)


# A context variable, because concurrent calls of one client retry independently.
_RETRIED: ContextVar[tuple[int, str]] = ContextVar("agl_retried", default=(0, ""))


def request_id_of(headers: dict[bytes, bytes], body: bytes, retries: int) -> str:
    """The id of a request: that of its header, or for a retry that of the first try, or else a new one.

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


def retry_count_of(headers: dict[bytes, bytes]) -> int:
    """The client's own count of earlier tries; 0 for clients that do not count."""
    text = headers.get(b"x-stainless-retry-count", b"0")
    return int(text) if text.isdigit() else 0
