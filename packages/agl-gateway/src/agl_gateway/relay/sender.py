"""Asks the servers of policies: one aiohttp session, the headers to pass on, and failures as problems."""

import asyncio
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from agl.contracts import Upstream
from agl.schemas import Dialect
from agl_gateway.relay.routing import UpstreamTarget
from agl_gateway.wire.client_apis import ClientApis
from agl_gateway.wire.problems import Problem

_log = logging.getLogger(__name__)

_FORWARDED = (
    *("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta", "openai-beta", "idempotency-key"),
    *("traceparent", "tracestate"),
)
"""Request headers that are passed to the backend; all others, above all credentials, are dropped."""

_NOT_RELAYED = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "content-length", "set-cookie", "date", "server"),
    )
)
_NO_ANSWER_CODES = ("upstream_unreachable", "upstream_failed")
"""Problems of a server that has not answered; another server may be asked, because sampling has no side effects."""

_CONNECT_TRIES = 3
_CONNECT_S = 10.0
_KEEPALIVE_S = 4.0
"""Below the 5 seconds after which uvicorn, and so vLLM, closes an idle connection."""
_CONNECT_PAUSE_S = 0.1
_IN_PARTS = 1024 * 1024
"""Bytes from which a body is sent in parts, so that other requests have their turn between them."""

_NOT_FOUND = 404


def make_session(*, timeout_s: float) -> aiohttp.ClientSession:
    """Create a session for all upstreams: no decompression, no cookies, no limit on connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=timeout_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept-Encoding", "User-Agent", "Accept"),
        read_bufsize=256 * 1024,
    )


def request_headers(headers: Mapping[str, str], target: UpstreamTarget, dialect: Dialect | None) -> dict[str, str]:
    """Return the headers for the backend: the client's harmless ones and the provider's key."""
    sent = {name: value for name in _FORWARDED if (value := headers.get(name)) is not None}
    sent["accept-encoding"] = "identity"
    if target.key:
        sent["authorization"] = f"Bearer {target.key}"
        if dialect == "messages":
            sent["x-api-key"] = target.key
    return sent


def reply_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the backend's headers for the client, without hop-by-hop headers."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_RELAYED)


@dataclass(eq=False, kw_only=True, slots=True)
class Answer:
    """A backend's answer: its body, or its open stream.

    Attributes:
        body: The whole body; empty for a stream.
        first_byte: When its head arrived, by :func:`time.perf_counter`.
    """

    response: aiohttp.ClientResponse
    body: bytes
    first_byte: float

    @property
    def is_stream(self) -> bool:
        """Return true if it is streamed as events."""
        return self.response.content_type == "text/event-stream"

    @property
    def encoding(self) -> str:
        """The encoding of its body; ``""`` for none."""
        return self.response.headers.get("content-encoding", "")


@dataclass(eq=False, kw_only=True)
class Sender:
    """Sends requests to the servers of policies. Used in one event loop only."""

    session: aiohttp.ClientSession
    apis: ClientApis
    _hinted: set[str] = field(default_factory=set[str], init=False)

    async def ask(self, url: str, body: bytes, headers: Mapping[str, str], *, connect_tries: int = 1) -> Answer:
        """Send a request; returns its answer, read as a whole unless it is a stream, which the caller closes.

        A failed connection is tried again, because nothing was sent; other failures are not.

        Raises:
            Problem: 502 if the backend cannot be reached or hangs up, 504 if it is silent too long.
        """
        response = await self._opened(url, body, headers, connect_tries)
        answer = Answer(response=response, body=b"", first_byte=perf_counter())
        if answer.is_stream:
            return answer
        try:
            answer.body = await response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _problem_of(error, url) from error
        finally:
            response.close()
        return answer

    async def ask_policy(
        self, target: UpstreamTarget, urls: list[str], body: bytes, headers: Mapping[str, str], *, dialect: Dialect
    ) -> tuple[Answer, str]:
        """Ask the rollout's own server, then the policy's others until one answers.

        Returns the answer and the URL that gave it, whose server counts as busy until :meth:`Replicas.ended`.

        Raises:
            NotSpokenError: The server does not have the API, and may be asked for a chat completion.
        """
        *_, last = urls
        for url in urls:
            target.replicas.begun(url)
            try:
                answer = await self.ask(url, body, headers, connect_tries=_CONNECT_TRIES if url == last else 1)
                if not answer.is_stream:
                    self.apis.check(dialect, answer.response.status)
            except BaseException as error:
                target.replicas.ended(url)
                if url == last or not isinstance(error, Problem) or error.code not in _NO_ANSWER_CODES:
                    raise
                target.replicas.failed(url)
            else:
                if answer.response.status == _NOT_FOUND:
                    self._hint_at_missing_path(target.upstream, url)
                return answer, url
        raise AssertionError("unreachable: the last server answers or raises")

    async def _opened(
        self, url: str, body: bytes, headers: Mapping[str, str], connect_tries: int
    ) -> aiohttp.ClientResponse:
        for attempt in range(1, connect_tries + 1):
            try:
                data = io.BytesIO(body) if len(body) > _IN_PARTS else body
                return await self.session.post(url, data=data, headers=headers, allow_redirects=False)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                is_unsent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
                if attempt == connect_tries or not is_unsent:
                    raise _problem_of(error, url) from error
                await asyncio.sleep(_CONNECT_PAUSE_S * attempt)
        raise AssertionError("unreachable: the last try returns or raises")

    def _hint_at_missing_path(self, upstream: Upstream, url: str) -> None:
        """Say once per policy that an address without a path, at which a server has nothing, may lack ``/v1``."""
        if urlsplit(upstream.base_url).path.strip("/") or upstream.name in self._hinted:
            return
        self._hinted.add(upstream.name)
        _log.warning(
            "%s answered 404. The address of policy %r has no path, and most APIs are below /v1: try %s/v1",
            url.split("?", 1)[0],
            upstream.name,
            upstream.base_url.rstrip("/"),
        )


def _problem_of(error: Exception, url: str) -> Problem:
    """Return a failure of the backend as a problem for the client."""
    where = url.split("?", 1)[0]
    if isinstance(error, aiohttp.ClientConnectorError):
        text = f"cannot be reached ({error}); check that it runs, and the policy's URL"
        return Problem(502, f"the backend at {where} {text}", code="upstream_unreachable", is_retryable=True)
    if isinstance(error, TimeoutError):
        text = f"was silent for too long ({type(error).__name__}); check its load, or raise the gateway's timeout"
        return Problem(504, f"the backend at {where} {text}", code="upstream_timeout", is_retryable=True)
    text = f"ended the connection before its answer did ({error or type(error).__name__})"
    return Problem(502, f"the backend at {where} {text}", code="upstream_failed", is_retryable=True)
