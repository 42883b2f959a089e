"""The wire hook, which observes model calls that leave through ``httpx`` or ``httpx2`` inside a rollout.

If there is a gateway, calls for a configured policy are redirected to it with the attempt's identity, even from clients
that were built long before the run, and the gateway records them. Without a gateway the hook records them, streamed or
not. Calls to other models are not redirected; the hook records them while a :class:`WireTracer` is installed.

Only ``send`` of the two modules' clients is wrapped. Clients of other libraries are recorded by the gateway or not at
all. The hook's own failures are logged and leave the request unchanged; the client's exceptions pass through.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Self

from agl import semconv
from agl.contracts import CannedAnswer, Tracer, Upstream
from agl.dialects import Request, sampled
from agl.errors import describe
from agl.tracing._caller import who_within
from agl.tracing._context import ActiveAttempt, current, innermost
from agl.tracing._import_watch import ImportWatch
from agl.tracing._open_span import note_model_call
from agl.tracing._patches import Undo, patch
from agl.tracing._wire.open_call import OpenCall, Tee
from agl.tracing._wire.outgoing import (
    Route,
    call_of,
    content_of,
    copy_request,
    gateway_headers,
    is_below,
    recorded_request,
    request_id_of,
    retry_count_of,
    route_of,
)

_log = logging.getLogger(__name__)

_MODULES = ("httpx", "httpx2")
# By name: the classes belong to httpx or httpx2, neither of which is imported here.
_NO_CONNECTION = ("ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol")


class WireTracer(Tracer):
    """Records the model calls of a rollout to models that no policy of the experiment serves.

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
    """Wrap the clients that are imported now or later; the returned function restores the originals."""
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
"""Set within a wrapped ``send``, so that a client that hands its request to another one is recorded once."""


@dataclass(kw_only=True)
class _WatchedRequest:
    """A request of a rollout; enter it as a context while it is in flight.

    Attributes:
        given: The client's own request.
        request: The request that is sent in place of ``given``.
        options: The options with which ``request`` is sent.
        call: The record of a model call, ``None`` for any other request.
        is_recorded_here: Whether the call is recorded in this process and not by the gateway.
        canned: The prepared response to a request that a responder answers and that is therefore not sent.
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
        """The response for the agent, whose bytes also go to the record of the call."""
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
    url, content = str(request.url), content_of(request)
    call = call_of(request, content)
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
    retries = retry_count_of(named := dict(headers))
    request_id = request_id_of(named, content or b"", retries)
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
        rewritten = gateway_headers(attempt, headers, parent_id=parent_id, request_id=request_id, names=names)
        sent = copy_request(request, route.url, headers=rewritten, body=content)
        # The token is the only credential, and a redirect must not carry it to another server.
        options = {**options, "auth": None, "follow_redirects": False}
    elif opened is not None:
        sent = recorded_request(request, opened.request, wants_ids=route.wants_ids)
    response = None if canned is None else _response_of(canned, answer, request)
    return _WatchedRequest(
        given=request, request=sent, options=options, call=opened, is_recorded_here=is_recorded_here, canned=response
    )


def _caller_names(attempt: ActiveAttempt, call: Request | None, span_id: str) -> tuple[str, ...]:
    """The caller's names; empty if no policy is chosen by names, because looking them up takes time."""
    if call is None or not any(upstream.agents for upstream in attempt.upstreams):
        return ()
    return who_within(attempt, span_id).names


def _canned_answer(attempt: ActiveAttempt, call: Request | None, span_id: str) -> CannedAnswer | None:
    """The responder's answer, if there is one."""
    if attempt.responder is None or call is None:
        return None
    return attempt.responder.respond(call, agent=who_within(attempt, span_id).agent)


def _response_of(given: CannedAnswer, answer: Any, request: Any) -> Any:
    """Convert a prepared answer to the client's response class ``answer``."""
    response = answer(given.status, headers={"content-type": given.content_type}, content=given.body, request=request)
    response.elapsed = timedelta()
    return response
