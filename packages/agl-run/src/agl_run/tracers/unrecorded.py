"""Counts model calls of rollouts that are made through HTTP clients whose calls are not recorded.

urllib, urllib3, requests and botocore send through ``http.client``; aiohttp has its own sockets. A successful POST to
a model's route becomes a span that names the library and the host. From these spans
:func:`agl.episodes.find_disagreement` learns of calls without a record. Requests are never changed: only their method
and URL are read, and only the URL's host is kept.

Calls to the run's own gateway are left out, because the gateway records them, and so are failed calls, which may be
tried again. A call to a policy's server counts as missing from the rollout's record; a call to another server, such as
that of a tool's model, is only reported. A call whose key is refused (401) becomes a failed span, from which the
attempt's error explains how the client gets a valid key.
"""

import inspect
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from types import FrameType, ModuleType
from typing import Any, ClassVar

from agl import semconv
from agl.tracing import ActiveAttempt, Undo, current, open_span, patch
from agl_run.access.tokens import PLACEHOLDER_KEY, REFUSED
from agl_run.tracers.module_tracer import ModuleTracer

_ROUTES = re.compile(
    r"/completions$"
    r"|/(?:v\d\w*|openai)/responses$"
    r"|/v\d\w*/(?:messages|chat)$"  # Anthropic, Cohere
    r"|/api/(?:chat|generate)$"  # Ollama
    r"|:(?:generateContent|streamGenerateContent|rawPredict|streamRawPredict)$"  # Gemini, Vertex AI
    r"|/model/[^/]+/(?:converse|invoke)(?:-stream|-with-response-stream)?$"  # Bedrock
)
"""Routes at which models generate. Chat services have routes that end in ``/messages``, so a version is required."""

_LIBRARIES = frozenset({"aiobotocore", "aiohttp", "botocore", "requests", "urllib", "urllib3"})
_BETWEEN = frozenset({"agl_run", "http"})
UNAUTHORIZED = 401
_WATCHED_ELSEWHERE = frozenset({"httpx", "httpx2"})


def _wrap_http_client(module: ModuleType) -> list[Undo]:
    kind = module.HTTPConnection
    return [patch(kind, "putrequest", _putrequest), patch(kind, "getresponse", _getresponse)]


def _wrap_aiohttp(module: ModuleType) -> list[Undo]:
    return [patch(module.ClientSession, "_request", _request)]


def _putrequest(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def putrequest(self: Any, method: str, url: str, *args: Any, **options: Any) -> None:
        self._agl_posted = (url, time.time_ns()) if method == "POST" else None
        original(self, method, url, *args, **options)

    return putrequest


def _getresponse(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def getresponse(self: Any, *args: Any, **options: Any) -> Any:
        response = original(self, *args, **options)
        posted: tuple[str, int] | None = getattr(self, "_agl_posted", None)
        # Cleared, because connections are used for several requests.
        self._agl_posted = None
        if posted is not None and _is_recorded(response.status, posted[0]):
            _record(response.status, _url_of(self, posted[0]), library="http.client", start_ns=posted[1])
        return response

    return getresponse


def _request(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def request(*args: Any, **options: Any) -> Any:
        start_ns = time.time_ns()
        response = await original(*args, **options)
        if response.method == "POST" and _is_recorded(response.status, response.url.path):
            _record(response.status, str(response.url), library="aiohttp", start_ns=start_ns)
        return response

    return request


def _is_model_route(target: str) -> bool:
    """Return true if a POST to ``target``, a URL or its path, asks a model to generate."""
    return _ROUTES.search(target.partition("?")[0].rstrip("/")) is not None


def _is_recorded(status: int, target: str) -> bool:
    """Return true if a response with this status has to be recorded: a model call, or a refused API key."""
    return status == UNAUTHORIZED or (status < 300 and _is_model_route(target))


def _record(status: int, url: str, *, library: str, start_ns: int) -> None:
    """Record a response as a span, if a rollout made the call and the call is unrecorded or was refused."""
    attempt = current()
    if attempt is None:
        return
    is_refused = status == UNAUTHORIZED
    kind = _refused_kind(url, attempt) if is_refused else _unrecorded_kind(url, attempt)
    # The stack is walked only for calls that count.
    library = _library_above(library) if kind else ""
    if library:
        about: dict[str, Any] = {"client": library, "server": url, "attributes": {semconv.UNRECORDED: kind}}
        span = open_span(start_ns=start_ns, is_current=False, unless_called=True, **about)
        span.close("the key was refused" if is_refused else None)


def _unrecorded_kind(url: str, attempt: ActiveAttempt) -> str:
    if _is_below(url, attempt.gateway_url):
        return ""
    return "policy" if _is_served(url, attempt) else "foreign"


def _refused_kind(url: str, attempt: ActiveAttempt) -> str:
    """Return ``refused`` if the refused key cannot be one that the run gave to the attempt, else ``""``."""
    if _is_below(url, attempt.gateway_url):
        return REFUSED
    has_no_key = os.environ.get("OPENAI_API_KEY") == PLACEHOLDER_KEY
    return REFUSED if has_no_key and _is_served(url, attempt) else ""


def _is_served(url: str, attempt: ActiveAttempt) -> bool:
    return any(_is_below(url, one) for up in attempt.upstreams for one in (up.base_url, *up.replicas))


def _is_below(url: str, root: str) -> bool:
    return bool(root) and f"{url}/".lower().startswith(f"{root.rstrip('/')}/".lower())


def _url_of(connection: Any, target: str) -> str:
    """Return the URL of a request; ``target`` is the request's path, or its whole URL behind a proxy."""
    if not target.startswith("/"):
        return target
    tunnel = connection._tunnel_host
    host, port = (tunnel, connection._tunnel_port) if tunnel else (connection.host, connection.port)
    netloc = f"[{host}]" if ":" in host else host
    if port != connection.default_port:
        netloc += f":{port}"
    return f"{'https' if connection.default_port == 443 else 'http'}://{netloc}{target}"


def _library_above(name: str) -> str:
    """Return the outermost HTTP library among the callers, or else ``name``; ``""`` if httpx records the call."""
    is_inside = True
    for module in _modules_above():
        if module in _WATCHED_ELSEWHERE:
            return ""
        is_inside = is_inside and module in _LIBRARIES | _BETWEEN
        if is_inside and module in _LIBRARIES:
            name = module
    return name


def _modules_above() -> Iterator[str]:
    """Yield the top-level module of each calling frame, innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back


class UnrecordedCalls(ModuleTracer):
    """Counts model calls that are made through HTTP clients without recording; see the module."""

    changes: ClassVar[Mapping[str, Callable[[ModuleType], Sequence[Undo]]]] = {
        "http.client": _wrap_http_client,
        "aiohttp": _wrap_aiohttp,
    }
