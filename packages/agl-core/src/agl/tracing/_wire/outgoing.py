"""Reads and rewrites a client's request without altering the object that the client holds.

Requests are ``httpx.Request`` or ``httpx2.Request``; both modules are optional, so neither is named in a type.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

from agl.dialects import prepare_body
from agl.schemas._ids import new_span_id
from agl.tracing._context import Capture
from agl.tracing._roles import WHO_HEADER, encode_names
from agl.tracing._wire.routing import Route

Headers: TypeAlias = list[tuple[bytes, bytes]]

_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie"})
_ROUTE_HEADERS = frozenset(
    {b"host", b"traceparent", b"tracestate", b"x-agl-span-id", b"x-agl-request-id", WHO_HEADER.encode()}
)
_DROPPED = _KEY_HEADERS | _ROUTE_HEADERS


def body_of(request: Any) -> bytes | None:
    """The content where it is in memory; ``None`` for a body that is generated while it is sent."""
    try:
        return request.content
    except Exception as error:  # the class belongs to whichever client module this is
        if type(error).__name__ != "RequestNotRead":
            raise
        return None


def recorded_request(request: Any, route: Route, body: bytes) -> Any:
    """The request itself, or a copy whose body asks for token ids where the route wants them."""
    changed = prepare_body(route.dialect, body, want_ids=route.wants_ids) if route.dialect else body
    if changed is body:
        return request
    headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
    return copy_request(request, route.url, headers=headers, body=changed)


def gateway_headers(
    capture: Capture, given: Headers, *, parent_id: str, request_id: str, names: Sequence[str] = ()
) -> Headers:
    """The request's headers with the attempt's identity in place of the client's credentials.

    ``names`` say who makes the call, innermost first.
    """
    headers = [(name, value) for name, value in given if name not in _DROPPED]
    if capture.token:
        token = capture.token.encode()
        has_key = any(name == b"x-api-key" for name, _ in given)
        headers.append((b"x-api-key", token) if has_key else (b"authorization", b"Bearer " + token))
    headers.append((b"traceparent", f"00-{capture.trace_id}-{parent_id}-01".encode()))
    headers.append((b"x-agl-span-id", parent_id.encode()))
    headers.append((b"x-agl-request-id", request_id.encode()))
    if names:
        headers.append((WHO_HEADER.encode(), encode_names(names).encode()))
    return headers


def copy_request(request: Any, url: str, *, headers: Headers, body: bytes | None) -> Any:
    """A request like ``request`` with other URL and headers; without ``body`` it shares the generated one."""
    content = {"stream": request.stream} if body is None else {"content": body}
    return type(request)(request.method, url, headers=headers, extensions=request.extensions, **content)


_RETRIED: ContextVar[tuple[int, str]] = ContextVar("agl_retried", default=(0, ""))


def request_id_of(headers: dict[bytes, bytes], body: bytes, retries: int) -> str:
    """The request's id: its own header, the id of the first try when this is a retry, else a new one.

    A client retries in the task or thread that made the first try, with the same body.
    """
    given = headers.get(b"x-agl-request-id")
    if given:
        return given.decode("ascii", "replace")
    digest, previous = _RETRIED.get()
    found = hash(body)
    if retries and previous and digest == found:
        return previous
    request_id = f"rq-{new_span_id()}"
    _RETRIED.set((found, request_id))
    return request_id


def retry_count_of(headers: dict[bytes, bytes]) -> int:
    """How often the client says that it has tried before; 0 for clients that do not count."""
    text = headers.get(b"x-stainless-retry-count", b"0")
    return int(text) if text.isdigit() else 0
