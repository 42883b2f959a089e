"""The wire hook: model calls that leave through ``httpx`` or ``httpx2`` inside a rollout.

With a gateway, calls for a configured policy go to it with the attempt's identity, even from clients that were
built long before the run; the gateway records them. Without one they are recorded here, streamed or not. Calls to
other models are left as they are, and recorded here too while a :class:`WireTracer` is installed.

Only ``send`` of the two modules' clients is wrapped: clients of other libraries are seen through the gateway or
not at all. The hook's own failures are logged and leave the request as it was; what the client raises passes through.
"""

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from threading import Lock
from types import ModuleType
from typing import Any, ClassVar

from agl.capture.context import Capture, current, innermost
from agl.capture.dialects import prepare_body
from agl.capture.exchanges import OpenCall
from agl.capture.late_import import ImportWatch
from agl.capture.process import Undo, replace
from agl.capture.routing import Route, route_of
from agl.capture.tee import AsyncTee, SyncTee, describe
from agl.ids import new_span_id

_log = logging.getLogger(__name__)

_MODULES = ("httpx", "httpx2")
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie"})
_ROUTE_HEADERS = frozenset({b"host", b"traceparent", b"tracestate", b"x-agl-span-id", b"x-agl-request-id"})
_DROPPED = _KEY_HEADERS | _ROUTE_HEADERS
_NO_CONNECTION = ("ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol")


class WireTracer:
    """Records the model calls of a rollout that go to models which no policy of the experiment serves.

    Calls of a run without a gateway are recorded in any case; the tracer extends that to runs with one, whose
    gateway never sees these calls. It names no current span: a request has no framework of its own.
    """

    _installed: ClassVar[set["WireTracer"]] = set()

    @classmethod
    def is_on(cls) -> bool:
        """Whether any tracer is installed in this process."""
        return bool(cls._installed)

    def install(self) -> None:
        """Record such calls from now on; idempotent."""
        self._installed.add(self)

    def uninstall(self) -> None:
        """Stop; calls under way are still recorded."""
        self._installed.discard(self)

    def current_span_id(self) -> str | None:
        """Always ``None``."""
        return None

    def flush(self, timeout_s: float) -> None:
        """Nothing waits: a call is recorded before its last byte reaches the agent."""

    def worker_env(self) -> Mapping[str, str]:
        """Nothing."""
        return {}


@dataclass
class _Hook:
    """The client modules that are patched now, as what undoes it."""

    lock: Lock = field(default_factory=Lock)
    undo: list[Undo] = field(default_factory=list[Undo])

    def patch(self, module: ModuleType) -> None:
        def send(original: Any) -> Any:
            return _send(original, type("SyncTee", (SyncTee, module.SyncByteStream), {}))

        def send_async(original: Any) -> Any:
            return _send_async(original, type("AsyncTee", (AsyncTee, module.AsyncByteStream), {}))

        with self.lock:
            self.undo.append(replace(module.Client, "send", send))
            self.undo.append(replace(module.AsyncClient, "send", send_async))

    def revert(self) -> None:
        with self.lock:
            while self.undo:
                self.undo.pop()()


def install() -> Undo:
    """Wrap the clients that are imported now or later; the returned function restores the originals."""
    hook = _Hook()
    watch = ImportWatch(_MODULES, hook.patch)
    watch.start()

    def undo() -> None:
        watch.stop()
        hook.revert()

    return undo


_IS_SENDING: ContextVar[bool] = ContextVar("agl_is_sending", default=False)
"""Set within a wrapped ``send``, so that a client that hands its request to another one is recorded once."""


def _send(original: Callable[..., Any], tee: Any) -> Callable[..., Any]:
    @wraps(original)
    def send(self: Any, request: Any, **options: Any) -> Any:
        departure = _depart(request, options)
        if departure is None:
            return original(self, request, **options)
        outer = _IS_SENDING.set(True)
        try:
            response = original(self, departure.request, **departure.options)
        except BaseException as error:
            departure.failed(error)
            raise
        finally:
            _IS_SENDING.reset(outer)
        return departure.arrived(response, tee)

    return send


def _send_async(original: Callable[..., Any], tee: Any) -> Callable[..., Any]:
    @wraps(original)
    async def send(self: Any, request: Any, **options: Any) -> Any:
        departure = _depart(request, options)
        if departure is None:
            return await original(self, request, **options)
        outer = _IS_SENDING.set(True)
        try:
            response = await original(self, departure.request, **departure.options)
        except BaseException as error:
            departure.failed(error)
            raise
        finally:
            _IS_SENDING.reset(outer)
        return departure.arrived(response, tee)

    return send


@dataclass(frozen=True)
class _Departure:
    """A request that is ours to watch: what is sent in its place, and the call that it is recorded as."""

    given: Any
    request: Any
    options: dict[str, Any]
    call: OpenCall | None
    is_ours: bool

    def failed(self, error: BaseException) -> None:
        """No response came. The gateway recorded the call unless it was not reached at all."""
        if self.call is None:
            return
        if self.is_ours or type(error).__name__ in _NO_CONNECTION:
            self.call.finish(is_complete=False, error=describe(error))
        else:
            self.call.discard()

    def arrived(self, response: Any, tee: Any) -> Any:
        try:
            response.request = self.given  # the copy that was sent carries the attempt's token
            if self.call is not None:
                self._listen(self.call, response, tee)
        except Exception:  # noqa: BLE001  # isolation point: the agent gets its response
            _log.exception("The answer to %s could not be observed.", self.given.url)
        return response

    def _listen(self, call: OpenCall, response: Any, tee: Any) -> None:
        if not self.is_ours:
            return call.discard()
        call.answered(response)
        if response.is_stream_consumed or response.is_closed:
            call.finish(is_complete=True, body=response.content)
        else:
            response.stream = tee(response.stream, call)
        return None


def _depart(request: Any, options: dict[str, Any]) -> _Departure | None:
    capture = current()
    if capture is None or _IS_SENDING.get():
        return None
    try:
        return _prepare(capture, request, options)
    except Exception:  # noqa: BLE001  # isolation point: the agent's request goes out as it was
        _log.exception("A request to %s could not be observed; it goes out unchanged.", request.url.host)
        return None


def _prepare(capture: Capture, request: Any, options: dict[str, Any]) -> _Departure | None:
    body = _body_of(request)
    route = route_of(capture, method=request.method, url=str(request.url), body=body)
    if route is None or (route.target == "record" and not _is_recorded(capture)):
        return None
    headers = [(name.lower(), value) for name, value in request.headers.raw]
    named = dict(headers)
    parent_id, retries = innermost(capture), _retry_count(named)
    request_id = _request_id(named, body or b"", retries)
    call = None
    if route.dialect is not None and body is not None:
        call = OpenCall(capture, route, body=body, parent_id=parent_id, request_id=request_id, retry_count=retries)
    if route.target == "gateway":
        ours = _gateway_headers(capture, headers, parent_id=parent_id, request_id=request_id)
        sent = _copy(request, route.url, headers=ours, body=body)
        # The token is the only credential, and a redirect must not carry it elsewhere.
        return _Departure(request, sent, {**options, "auth": None, "follow_redirects": False}, call, is_ours=False)
    return _Departure(request, _recorded_request(request, route, body or b""), options, call, is_ours=True)


def _is_recorded(capture: Capture) -> bool:
    return not capture.gateway_url or WireTracer.is_on()


def _body_of(request: Any) -> bytes | None:
    """The content where it is in memory; ``None`` for a body that is generated while it is sent."""
    try:
        return request.content
    except Exception as error:  # the class belongs to whichever client module this is
        if type(error).__name__ != "RequestNotRead":
            raise
        return None


def _recorded_request(request: Any, route: Route, body: bytes) -> Any:
    changed = prepare_body(route.dialect, body, want_ids=route.wants_ids) if route.dialect else body
    if changed is body:
        return request
    headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
    return _copy(request, route.url, headers=headers, body=changed)


def _gateway_headers(
    capture: Capture, given: list[tuple[bytes, bytes]], *, parent_id: str, request_id: str
) -> list[tuple[bytes, bytes]]:
    """The request's headers with the attempt's identity in place of the client's credentials."""
    headers = [(name, value) for name, value in given if name not in _DROPPED]
    if capture.token:
        has_key = any(name == b"x-api-key" for name, _ in given)
        key = (
            (b"x-api-key", capture.token.encode())
            if has_key
            else (b"authorization", b"Bearer " + capture.token.encode())
        )
        headers.append(key)
    headers.append((b"traceparent", f"00-{capture.trace_id}-{parent_id}-01".encode()))
    headers.append((b"x-agl-span-id", parent_id.encode()))
    headers.append((b"x-agl-request-id", request_id.encode()))
    return headers


def _copy(request: Any, url: str, *, headers: list[tuple[bytes, bytes]], body: bytes | None) -> Any:
    content = {"stream": request.stream} if body is None else {"content": body}
    return type(request)(request.method, url, headers=headers, extensions=request.extensions, **content)


_RETRIED: ContextVar[tuple[int, str]] = ContextVar("agl_retried", default=(0, ""))


def _request_id(headers: dict[bytes, bytes], body: bytes, retries: int) -> str:
    """The request's id: its own header, the id of the first try when this is a retry, else a new one.

    A client retries in the task or thread that made the first try, with the same body.
    """
    given = headers.get(b"x-agl-request-id")
    if given:
        return given.decode("ascii", "replace")
    digest, previous = _RETRIED.get()
    found = hash(body)
    if retries and digest == found:
        return previous
    request_id = f"rq-{new_span_id()}"
    _RETRIED.set((found, request_id))
    return request_id


def _retry_count(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"x-stainless-retry-count", b"0")
    return int(text) if text.isdigit() else 0
