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
from datetime import timedelta
from functools import wraps
from threading import Lock
from types import ModuleType
from typing import Any, ClassVar

import msgspec

from agl import semconv
from agl.contracts import CannedAnswer, Upstream
from agl.dialects import dialect_of
from agl.tracing._caller import who
from agl.tracing._context import Capture, current, innermost
from agl.tracing._departures import note_departure
from agl.tracing._late_import import ImportWatch
from agl.tracing._process import Undo, replace
from agl.tracing._roles import names_of
from agl.tracing._wire.open_call import OpenCall
from agl.tracing._wire.outgoing import (
    body_of,
    copy_request,
    gateway_headers,
    recorded_request,
    request_id_of,
    retry_count_of,
)
from agl.tracing._wire.routing import Route, route_of
from agl.tracing._wire.tee import AsyncTee, SyncTee, describe

_log = logging.getLogger(__name__)

_MODULES = ("httpx", "httpx2")
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
            return _send(original, type("SyncTee", (SyncTee, module.SyncByteStream), {}), module.Response)

        def send_async(original: Any) -> Any:
            return _send_async(original, type("AsyncTee", (AsyncTee, module.AsyncByteStream), {}), module.Response)

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


def _send(original: Callable[..., Any], tee: Any, answer: Any) -> Callable[..., Any]:
    @wraps(original)
    def send(self: Any, request: Any, **options: Any) -> Any:
        departure = _depart(request, options)
        if departure is None:
            return original(self, request, **options)
        if departure.played is not None:
            return departure.answered(departure.played, answer)
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


def _send_async(original: Callable[..., Any], tee: Any, answer: Any) -> Callable[..., Any]:
    @wraps(original)
    async def send(self: Any, request: Any, **options: Any) -> Any:
        departure = _depart(request, options)
        if departure is None:
            return await original(self, request, **options)
        if departure.played is not None:
            return departure.answered(departure.played, answer)
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
    """A request that is ours to watch: what is sent in its place, and the call that it is recorded as.

    One that is ``played`` (answered without a model) is not sent at all.
    """

    given: Any
    request: Any
    options: dict[str, Any]
    call: OpenCall | None
    is_ours: bool
    played: CannedAnswer | None = None

    def answered(self, played: CannedAnswer, answer: Any) -> Any:
        """The canned answer as a response of the client's own class ``answer``."""
        response = answer(200, headers={"content-type": played.content_type}, content=played.body, request=self.given)
        response.elapsed = timedelta()
        if self.call is not None:
            self.call.answered(response)
            self.call.finish(is_complete=True, body=played.body)
        return response

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
    body = body_of(request)
    names = _names(capture, request)
    route = route_of(capture, method=request.method, url=str(request.url), body=body, names=names)
    if route is None or (route.target == "record" and not _is_recorded(capture)):
        return None
    played = _played(capture, route, body)
    if played is not None:
        route = _route_of_played(route, played)
    headers = [(name.lower(), value) for name, value in request.headers.raw]
    named = dict(headers)
    parent_id, retries = innermost(capture), retry_count_of(named)
    request_id = request_id_of(named, body or b"", retries)
    call = None
    if route.dialect is not None and body is not None:
        note_departure()
        about = {semconv.CALLER: list(names), semconv.USER_AGENT: named.get(b"user-agent", b"").decode("latin-1")}
        call = OpenCall(
            capture,
            route,
            body=body,
            parent_id=parent_id,
            request_id=request_id,
            retry_count=retries,
            about={key: value for key, value in about.items() if value},
        )
    if played is not None:
        return _Departure(request, request, options, call, is_ours=True, played=played)
    if route.target == "gateway":
        ours = gateway_headers(capture, headers, parent_id=parent_id, request_id=request_id, names=names)
        sent = copy_request(request, route.url, headers=ours, body=body)
        # The token is the only credential, and a redirect must not carry it elsewhere.
        return _Departure(request, sent, {**options, "auth": None, "follow_redirects": False}, call, is_ours=False)
    return _Departure(request, recorded_request(request, route, body or b""), options, call, is_ours=True)


def _names(capture: Capture, request: Any) -> tuple[str, ...]:
    """Who makes a model call, where any policy is chosen by that; what nobody asks for costs nothing."""
    if request.method != "POST" or not any(upstream.agents for upstream in capture.upstreams):
        return ()
    return names_of(who(capture)) if dialect_of(request.url.path) is not None else ()


def _played(capture: Capture, route: Route, body: bytes | None) -> CannedAnswer | None:
    """The answer that needs no model, if there is one."""
    if capture.responder is None or route.dialect is None or body is None:
        return None
    return capture.responder.respond(route.dialect, body, agent=who(capture).agent)


def _route_of_played(route: Route, played: CannedAnswer) -> Route:
    """The call as it is recorded: here, of no policy, with a model version that says that it was played."""
    nobody = Upstream(name="", base_url="", model_version=played.model_version)
    return msgspec.structs.replace(route, target="record", upstream=nobody, wants_ids=False)


def _is_recorded(capture: Capture) -> bool:
    return not capture.gateway_url or WireTracer.is_on()
