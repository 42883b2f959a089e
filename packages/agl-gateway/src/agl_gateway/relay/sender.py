"""Sends requests to the policies' servers, and passes streamed answers on as they arrive.

:class:`ClientApis` decides which calls in the messages and responses APIs reach their policy as chat completions. A
policy in training needs the ids of its tokens, which most servers return for chat completions only: vLLM returns none
in messages and no log-probabilities of tool calls in responses, and the servers of this project have neither API. The
gateway's setting ``native_apis`` names the APIs in which a server returns them too. Other policies' servers are called
in the client's API, unless they lack it.

:class:`StreamEnd` finds the last event of a stream, after which clients stop reading. Only lines of server-sent events
count, never the text in an event, because an answer may well discuss such events.

- chat and completions: ``data: [DONE]``
- responses: an event of the type ``response.completed``, ``response.incomplete`` or ``response.failed``
- messages: an event of the type ``message_stop``

Google's clients get translations of chat completions.
"""

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict, MultiMapping

from agl.contracts import POLICY_KEY_ENV, Upstream
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Dialect
from agl.urls import shown_url
from agl_gateway.relay.bodies import ENCODINGS, INFLATE_ERRORS, READABLE, Inflater, encodings_of
from agl_gateway.relay.callers import clean
from agl_gateway.relay.routing import UpstreamTarget, proxy_for
from agl_gateway.wire.http.calls import CallReply
from agl_gateway.wire.http.upstream import CONNECT_S, KEEPALIVE_S, Pool, Response, SilentConnectError, UnreachableError
from agl_gateway.wire.messages import MessagesTranslation
from agl_gateway.wire.problems import Problem, problem_body
from agl_gateway.wire.responses import ResponsesTranslation
from agl_gateway.wire.translation import Outgoing, StreamTranslation, Translation

_log = logging.getLogger(__name__)

_FORWARDED = (
    *("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta", "openai-beta", "idempotency-key"),
    *("traceparent", "tracestate"),
)
"""Request headers that are passed to the backend; all others, above all credentials, are dropped."""

_NOT_RELAYED = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "content-length", "content-encoding", "set-cookie", "date", "server", "location"),
    )
)
_NOT_RELAYED_GROUPS = ("access-control-", "x-agl-")
"""Beginnings of response headers that only the gateway itself may set."""

_NO_ANSWER_CODES = ("upstream_unreachable", "upstream_failed", "unreadable_answer")
"""Codes of errors without a readable answer; another server may be tried, because sampling has no side effects."""

_CONNECT_TRIES = 3
_CONNECT_PAUSE_S = 0.1

_OTHER_ENCODINGS = ("br", "compress", "x-compress", "dcb", "dcz")
"""Content encodings that the gateway does not read; any other word, such as utf-8, means an uncompressed answer."""

_NOT_FOUND = 404


def make_session(*, timeout_s: float) -> aiohttp.ClientSession:
    """Create a session for other gateways, and for upstreams behind a proxy, without cookies.

    :func:`decompressed` reads the answers of servers that compress them unasked.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept-Encoding", "User-Agent", "Accept"),
        read_bufsize=256 * 1024,
        auto_decompress=False,
    )


def request_headers(headers: Mapping[str, str], target: UpstreamTarget, dialect: Dialect | None) -> dict[str, str]:
    """Return the headers for the backend: the forwarded ones of the client, and the policy's API key."""
    sent = {name: value for name in _FORWARDED if (value := headers.get(name)) is not None}
    sent["accept-encoding"] = "identity"
    if target.key:
        sent["authorization"] = f"Bearer {target.key}"
        if dialect == "messages":
            sent["x-api-key"] = target.key
    return sent


def reply_headers(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """Return the backend's response headers without those of its connection, its site, and the gateway."""
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (lower := name.lower()) not in _NOT_RELAYED and not lower.startswith(_NOT_RELAYED_GROUPS)
    )


ModelResponse = aiohttp.ClientResponse | Response
"""A response of a policy's server, as either client reads it."""


@dataclass(eq=False, kw_only=True, slots=True)
class Answer:
    """A response of the backend: its whole body, or an open stream.

    Attributes:
        body: The whole body; empty for a stream.
        first_byte: The time of :func:`time.perf_counter` at which the headers arrived.
    """

    response: ModelResponse
    body: bytes
    first_byte: float

    @property
    def is_stream(self) -> bool:
        """True if the response is a stream of server-sent events."""
        return self.response.content_type == "text/event-stream"


ABSENT = (404, 405, 501)
"""Statuses of a server that does not have the requested endpoint."""

FIRST_ERROR = 400
_MAX_WARNED = 1000
_MAX_NAME = 200

_TRANSLATED: dict[Dialect, type[Translation]] = {"messages": MessagesTranslation, "responses": ResponsesTranslation}


_UNSENT = (UnreachableError, SilentConnectError, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors after which a request may be sent again, because nothing was sent."""


class NotSpokenError(Exception):
    """Raised if the policy's server does not have the API of a call; nothing was sampled."""


class ClientApis:
    """Decides which calls of clients are translated to chat completions. Used in one event loop only.

    Args:
        native: APIs in which the servers of policies in training return the ids of all tokens.

    Raises:
        ConfigError: An API in ``native`` is neither ``messages`` nor ``responses``.
    """

    def __init__(self, native: Collection[str] = ()) -> None:
        unknown = sorted(set(native) - _TRANSLATED.keys())
        if unknown:
            hint = did_you_mean(unknown[0], _TRANSLATED, otherwise=f"known are {' and '.join(_TRANSLATED)}")
            raise ConfigError(f"native_apis names {unknown[0]!r}, which is never translated; {hint}")
        self._native = frozenset(native)
        self._absent: set[tuple[str, Dialect]] = set()
        self._warned: set[tuple[str, str]] = set()

    def is_translated(self, upstream: Upstream, dialect: Dialect) -> bool:
        """Return true if calls in this dialect are sent to the upstream as chat completions."""
        is_absent = (upstream.name, dialect) in self._absent
        return dialect in _TRANSLATED and (is_absent or (upstream.is_trained and dialect not in self._native))

    def translated(self, call: Outgoing, upstream: Upstream) -> Outgoing:
        """Translate a call to a chat completion; logs each dropped tool once per policy.

        Raises:
            Problem: 400 for a call that cannot be expressed as a chat completion.
        """
        translated = call.translated(_TRANSLATED[call.request.dialect]())
        for name in translated.dropped:
            warning = (upstream.name, name)
            if warning not in self._warned and len(self._warned) < _MAX_WARNED:
                self._warned.add(warning)
                _log.warning(
                    "a request offers the tool %r to policy %r, whose server cannot run it; the policy does not see "
                    "it. Switch it off in the client, or let the client run it",
                    clean(name, _MAX_NAME),
                    upstream.name,
                )
        return translated

    def check(self, dialect: Dialect, status: int) -> None:
        """Raise :class:`NotSpokenError` if ``status`` shows that the server lacks the API of ``dialect``."""
        if status in ABSENT and dialect in _TRANSLATED:
            raise NotSpokenError

    def learn(self, upstream: Upstream, dialect: Dialect, status: int) -> None:
        """Remember that an upstream lacks an API, unless the chat completion sent instead failed with ``status``."""
        if status < FIRST_ERROR:
            self._absent.add((upstream.name, dialect))


@dataclass(eq=False, kw_only=True)
class Sender:
    """Sends requests to the servers of policies. Used in one event loop only.

    Attributes:
        session: Asks the servers behind a proxy.
        max_answer: Largest answer in bytes, after decompression.
        proxies: The proxies of the environment, by scheme.
    """

    pool: Pool
    session: aiohttp.ClientSession
    apis: ClientApis
    max_answer: int
    proxies: Mapping[str, str] = field(default_factory=getproxies_environment)
    _hinted: set[str] = field(default_factory=set[str], init=False)

    async def ask(
        self, url: str, body: bytes, headers: Mapping[str, str], *, connect_tries: int = 1, is_direct: bool = False
    ) -> Answer:
        """Send a request, with ``is_direct`` past any proxy; returns the answer.

        A stream is returned open, for the caller to close; any other answer is read to its end. A failed connection is
        retried, because nothing was sent; other failures are not.

        Raises:
            Problem: 502 if the backend cannot be reached, closes the connection, sends too much or compresses its
                answer in an unreadable way; 504 if it is silent for too long.
        """
        proxy = "" if is_direct else proxy_for(url, self.proxies)
        response = await self._opened(url, body, headers, connect_tries, proxy=proxy)
        answer = Answer(response=response, body=b"", first_byte=perf_counter())
        if answer.is_stream:
            return answer
        try:
            answer.body = b"".join([part async for part in decompressed(response, limit=self.max_answer)])
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _problem(error, url, proxy) from error
        finally:
            response.close()
        return answer

    async def ask_policy(
        self,
        target: UpstreamTarget,
        servers: list[str],
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        dialect: Dialect,
    ) -> tuple[Answer, str]:
        """Ask ``servers`` in order until one answers.

        Returns the answer and the server's base URL. The call counts as in flight there until the caller subtracts it.

        Raises:
            NotSpokenError: The server does not have the API, and may be asked for a chat completion.
        """
        load = target.replicas.load
        # A run's own policies are in its own network, at addresses that nobody lists in NO_PROXY in advance.
        is_own = target.upstream.api_key_env == POLICY_KEY_ENV
        *_, last = servers
        for server in servers:
            load.in_flight[server] += 1
            try:
                tries = _CONNECT_TRIES if server == last else 1
                answer = await self.ask(server + path, body, headers, connect_tries=tries, is_direct=is_own)
                if not answer.is_stream:
                    self.apis.check(dialect, answer.response.status)
            except BaseException as error:
                load.in_flight[server] -= 1
                if server == last or not isinstance(error, Problem) or error.code not in _NO_ANSWER_CODES:
                    raise
                load.failed(server)
            else:
                if answer.response.status == _NOT_FOUND:
                    self._hint_at_missing_path(target.upstream, server + path)
                return answer, server
        raise AssertionError("unreachable: the last server answers or raises")

    async def _opened(
        self, url: str, body: bytes, headers: Mapping[str, str], connect_tries: int, *, proxy: str
    ) -> ModelResponse:
        for attempt in range(1, connect_tries + 1):
            try:
                if not proxy:
                    return await self.pool.post(url, body, headers)
                data = io.BytesIO(body)  # sent in parts
                return await self.session.post(url, data=data, headers=headers, allow_redirects=False, proxy=proxy)
            except (aiohttp.ClientError, UnreachableError, TimeoutError, ConnectionError) as error:
                if attempt == connect_tries or not isinstance(error, _UNSENT):
                    raise _problem(error, url, proxy) from error
                await asyncio.sleep(_CONNECT_PAUSE_S * attempt)
        raise AssertionError("unreachable: the last try returns or raises")

    def _hint_at_missing_path(self, upstream: Upstream, url: str) -> None:
        """Warn once per policy, after a 404, that an address without a path may need ``/v1``."""
        if urlsplit(upstream.base_url).path.strip("/") or upstream.name in self._hinted:
            return
        self._hinted.add(upstream.name)
        _log.warning(
            "%s answered 404. The address of policy %r has no path, and most APIs are below /v1: try %s/v1",
            url.split("?", 1)[0],
            upstream.name,
            upstream.base_url.rstrip("/"),
        )


def _problem(error: Exception, url: str, proxy: str) -> Problem:
    """Return the HTTP error for the client that reports a failure of the backend."""
    proxy = shown_url(proxy)
    where = url.split("?", 1)[0] + (f", asked through the proxy {proxy}," if proxy else "")
    if isinstance(error, UnreachableError | aiohttp.ClientConnectorError | aiohttp.ClientHttpProxyError):
        found = f"the proxy answers {error.status}" if isinstance(error, aiohttp.ClientHttpProxyError) else error
        advice = f"add {urlsplit(url).hostname} to NO_PROXY if it needs none" if proxy else "and the policy's URL"
        text = f"cannot be reached ({found}); check that it runs, {advice}"
        return Problem(502, f"the backend at {where} {text}", code="upstream_unreachable", is_retryable=True)
    if isinstance(error, TimeoutError):
        text = f"was silent for too long ({type(error).__name__}); check its load, or raise the gateway's timeout"
        return Problem(504, f"the backend at {where} {text}", code="upstream_timeout", is_retryable=True)
    text = f"ended the connection before its answer did ({error or type(error).__name__})"
    return Problem(502, f"the backend at {where} {text}", code="upstream_failed", is_retryable=True)


async def decompressed(response: ModelResponse, *, limit: int) -> AsyncIterator[bytes]:
    """Yield the decompressed bytes of an answer as they arrive.

    Raises:
        Problem: 502 if the answer has more than ``limit`` bytes, or is not in the encoding that its header names.
    """
    encodings = [name for name in encodings_of(response.headers) if name in (*ENCODINGS, *_OTHER_ENCODINGS)]
    encoding = ", ".join(encodings)
    inflater = Inflater(encoding, is_series=True) if encoding in ENCODINGS else None
    data, size = b"-", 0
    try:
        while data:
            data = await response.content.readany()
            if data and encoding and inflater is None:
                raise _unreadable(f"has the content-encoding {encoding!r}, and the gateway reads {READABLE} only")
            pieces = iter((data,))
            if inflater is not None:
                pieces = inflater.feed(data) if data else inflater.end()
            for piece in filter(None, pieces):
                if (size := size + len(piece)) > limit:
                    raise _too_large(limit)
                yield piece
                if inflater is not None:
                    await asyncio.sleep(0)  # the event loop serves other requests between the pieces
    except INFLATE_ERRORS as error:
        raise _unreadable(f"is not the {encoding} that its content-encoding header says ({error})") from error


def _unreadable(problem: str) -> Problem:
    text = f"the backend's answer {problem}; let the backend send it uncompressed, as the gateway asks it to"
    return Problem(502, text, code="unreadable_answer", is_retryable=True)


def _too_large(limit: int) -> Problem:
    return Problem(
        502,
        f"the backend's answer is larger than {limit} bytes; ask for less in one request (fewer tokens, or fewer texts "
        "to embed), or raise the gateway's max_answer (agl serve --max-answer)",
        code="answer_too_large",
    )


_END_OF_BODY_S = 1.0
"""Seconds that the body of a stream may take to end after its last event."""

_DONE = b"[DONE]"
_LAST_TYPES = (b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
_MARKS = (_DONE, *_LAST_TYPES)


class _Event(msgspec.Struct):
    type: str = ""


_EVENT: msgspec.json.Decoder[_Event] = msgspec.json.Decoder(_Event)


class StreamEnd:
    """Finds the last event of a stream whose bytes arrive in arbitrary pieces.

    A piece that contains none of the searched marks, such as ``[DONE]``, is not parsed.

    Attributes:
        has_begun: True once a line of the last event has arrived; a client that reads line by line may stop there.
        is_here: True once the whole last event has arrived.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.is_here = False
        self._open: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes of the stream."""
        ended = chunk.rfind(b"\n") + 1
        if not ended:
            self._open.append(chunk)
            return
        text = b"".join((*self._open, chunk[:ended])) if self._open else chunk[:ended]
        self._open = [chunk[ended:]] if ended < len(chunk) else []
        if self.has_begun or _is_marked(text):
            for line in text.splitlines():
                self._read(line)

    def _read(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.strip()
        if not line:  # it ends the event
            self.is_here = self.has_begun
        elif field == b"event":
            self.has_begun |= value in _LAST_TYPES
        elif field == b"data":
            self.has_begun |= value == _DONE or _type_of(value) in _LAST_TYPES


def _is_marked(text: bytes) -> bool:
    return any(mark in text for mark in _MARKS)


def _type_of(data: bytes) -> bytes:
    """Return the type of an event that could be the last one of a stream; ``b""`` for any other event."""
    if not _is_marked(data):
        return b""
    try:
        return _EVENT.decode(data).type.encode()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return b""


@dataclass(eq=False, kw_only=True)
class Pump:
    """Passes the body of a streamed answer on to the client as it arrives.

    Attributes:
        translation: Translates the body for the client; ``None`` if the client uses the backend's API.
        dialect: The backend's API.
        max_size: Largest body in bytes.
        holds_end: Hold back the last event, which the caller sends once the call is durable. Clients take this event
            for the end, and an answer whose end was seen must not get lost.
        is_cut: True if the body is too large or unreadable, and was ended with an error event.
        chunks: The bytes from the backend.
        held: The bytes held back from the client.
    """

    response: ModelResponse
    reply: web.StreamResponse | CallReply
    translation: StreamTranslation | None
    dialect: Dialect
    max_size: int
    holds_end: bool
    is_cut: bool = field(default=False, init=False)
    chunks: list[bytes] = field(default_factory=list[bytes], init=False)
    held: bytearray = field(default_factory=bytearray, init=False)
    _end: StreamEnd = field(default_factory=StreamEnd, init=False)

    async def run(self) -> str:
        """Pass the body on to its end; returns ``""`` if the body is complete, else the error that cut it short.

        Raises:
            ConnectionError: The client has disconnected.
        """
        body = decompressed(self.response, limit=self.max_size)
        while True:
            try:
                async with asyncio.timeout(_END_OF_BODY_S if self._end.is_here else None):
                    chunk = await anext(body, b"")
            except (Problem, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                if isinstance(error, Problem) and not self._end.is_here:
                    return await self._cut(error)
                if not self._end.is_here:
                    return f"the backend's stream broke off: {error or type(error).__name__}"
                chunk = b""  # the last event is here, whatever becomes of the connection
            if not chunk:
                await self._pass(b"" if self.translation is None else self.translation.end())
                return ""
            self.chunks.append(chunk)
            self._end.feed(chunk)
            await self._pass(chunk if self.translation is None else self.translation.feed(chunk))

    def taken(self) -> list[bytes]:
        """Return the bytes from the backend, as they arrived, and forget them."""
        chunks, self.chunks = self.chunks, []
        return chunks

    async def _cut(self, problem: Problem) -> str:
        """End the client's stream with an error event of its API; returns the error."""
        self.is_cut = True
        event = b"event: error\ndata: %b\n\n" % problem_body(problem, self.dialect)
        await self._pass(b"\n\n" + event if self.translation is None else self.translation.feed(b"\n\n" + event))
        return str(problem)

    async def _pass(self, passed: bytes) -> None:
        if self.holds_end and self._end.has_begun:
            self.held += passed
        elif passed:
            await self.reply.write(passed)
