"""Calls the store of ``agl serve`` from another process or machine: the whole store contract over HTTP.

Client and server both derive their methods from the contract's table (:mod:`agl_gateway.store_api.contract`).
"""

import asyncio
import functools
import io
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote

import aiohttp
import msgspec

from agl.contracts import Store
from agl.errors import ConfigError, StoreError, TokenError
from agl.schemas import Claim, new_trace_id
from agl.urls import shown_url, web_parts, without_credentials
from agl_gateway.access.worker_tokens import ADMIN_ENV, WORKER_TOKENS, IssuedToken, TokenRequest, named_keys
from agl_gateway.processes.loop_thread import LoopThread
from agl_gateway.store_api.contract import MAX_WAIT_S, METHODS, Fault, Method, error_of
from agl_run import (
    SECRET_ENV,
    WORKER_TOKEN_ENV,
    WorkerKey,
    client_context,
    is_secret_given,
    refusal_of,
    signing_keys,
    worker_key,
)
from agl_run.access import AdminKey, IssuedClaim

_CONNECT_S = 10.0
_REPLY_S = 120.0
_MSGPACK = "application/msgpack"
_LARGE_BYTES = 1 << 20
"""Larger bodies are sent in parts, so that they do not block the event loop."""


RETRY_DELAYS_S = (0.05, 0.2, 0.5, 1.0, 2.0)
RESTART_DELAYS_S = (4.0, 8.0, 16.0)
"""Further delays for a store that has answered before and may be restarting."""

_NO_STORE = (502, 504)
"""Statuses that a load balancer sends when the store does not answer; a store itself never sends them."""

_AWAY = 503
"""The status that a balancer sends without a store, and that a store sends if it is busy or its database fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReply:
    """An answer of the store, or of a balancer in front of it.

    Attributes:
        retry_after: The ``Retry-After`` header; ``""`` if it is absent.
    """

    status: int
    body: bytes
    retry_after: str

    @property
    def is_passing(self) -> bool:
        """True if the same request may be tried again, because no store answered or the store was busy."""
        return self.status in _NO_STORE or (self.status == _AWAY and (bool(self.retry_after) or self.fault() is None))

    @property
    def retry_after_s(self) -> float:
        """Seconds to wait according to the ``Retry-After`` header; 0 if the header is absent or holds a date."""
        return float(self.retry_after) if self.retry_after.isdecimal() else 0.0

    @property
    def start(self) -> str:
        """The first 120 bytes of the body, as text."""
        return self.body[:120].decode("utf-8", "replace")

    def fault(self) -> Fault | None:
        """Return the store's error in the response body; ``None`` if the body is not one."""
        try:
            return msgspec.msgpack.decode(self.body, type=Fault)
        except msgspec.DecodeError:
            return None


class Pauses:
    """Chooses the pauses between the attempts to send one request."""

    def __init__(self) -> None:
        self._tries = 0
        self._paused_s = 0.0

    def next_s(self, delays: Sequence[float], *, asked_s: float = 0.0) -> float | None:
        """Return the seconds to pause before the next attempt; ``None`` to give up.

        The pause is the next of ``delays``, or ``asked_s`` if that is longer, but at most the longest of ``delays``.
        The result is ``None`` after ``len(delays)`` pauses, or once the pauses together lasted as long as all
        ``delays``.
        """
        left_s = sum(delays) - self._paused_s
        if self._tries >= len(delays) or left_s < delays[0]:
            return None
        pause_s = min(max(delays[self._tries], min(asked_s, max(delays))), left_s)
        self._tries += 1
        self._paused_s += pause_s
        return pause_s


class HttpStore:
    """Implements :class:`agl.contracts.Store`; usable from several threads and event loops at once.

    The store has a thread with its own event loop and connections. The first call starts the thread, and :meth:`close`
    ends it. Unanswered requests are repeated, except ``delete``, which is not safe to repeat: for about 4 seconds if
    the store never answered, and for half a minute if it did and may be restarting. A balancer's 502, 503 or 504 does
    not count as an answer. Nor does a store's 503 with ``Retry-After``, which gives the length of the next pause.

    Args:
        url: ``http://host:port``; the token may stand before the host, as in ``http://:TOKEN@host``. With ``https``,
            ``?ca=FILE`` names the authorities to trust; by default those of ``AGL_CA_FILE``, else the system's.
        token: The admin token; by default the URL's, else a worker's token in ``AGL_WORKER_TOKEN`` or in the file that
            ``AGL_WORKER_TOKEN_FILE`` names, else the environment's ``AGL_TOKEN``, else the first line of the file that
            ``AGL_TOKEN_FILE`` names; files are read again when they change. Without any of them the store signs a token
            with the environment's ``AGL_SECRET``, which every gateway with the same secret accepts.

    Raises:
        ConfigError: The URL is invalid, or there is no token.
    """

    def __init__(self, url: str, *, token: str = "") -> None:
        parts = _parts(url)
        self._url = without_credentials(parts._replace(query="").geturl()).rstrip("/")
        self._ca, self._context = _trust_of(parts)
        found = _key_of(token or unquote(parts.password or parts.username or ""))
        if found is None:
            raise ConfigError(
                f"the store at {self._url} needs a token; set AGL_TOKEN to the token in `agl serve`'s token file, "
                f"or {SECRET_ENV} to the secret that it runs with"
            )
        self._key = found
        self._thread = LoopThread("agl-http-store")
        self._session: aiohttp.ClientSession | None = None
        self._abandoned: dict[tuple[str | None, int], list[str]] = {}
        self._is_closed = False
        self._has_answered = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoders = {name: msgspec.msgpack.Decoder(method.result) for name, method in METHODS.items()}
        if isinstance(found, WorkerKey):
            self._decoders["claim"] = msgspec.msgpack.Decoder(list[IssuedClaim])

    def __repr__(self) -> str:
        return f"HttpStore({self._url!r})"

    async def claim(
        self,
        *,
        worker: str,
        limit: int = 1,
        lease_s: float = 60.0,
        wait_s: float = 0.0,
        experiment: str | None = None,
        claim_id: str = "",
    ) -> list[Claim]:
        """Open attempts; if the answer is lost, the request is repeated under the same claim id.

        A claim that follows a cancelled one reuses its id, and so gets the rollouts that the cancelled claim took.
        """
        abandoned = self._abandoned.setdefault((experiment, limit), [])
        own_id = claim_id or (abandoned.pop() if abandoned else new_trace_id())
        asked = {"worker": worker, "limit": limit, "lease_s": lease_s, "wait_s": wait_s, "experiment": experiment}
        try:
            return await self.call(METHODS["claim"], {**asked, "claim_id": own_id})
        except asyncio.CancelledError:
            if not claim_id:
                abandoned.append(own_id)
            raise

    async def make_worker_token(self, experiment: str, *, valid_s: float, name: str = "") -> str:
        """Ask the gateway for a token for the workers of one experiment; needs the admin token.

        Raises:
            TokenError: The gateway refuses this machine's token.
            StoreError: The gateway cannot be reached, or rejects the request.
        """
        self._thread.start()
        body = msgspec.json.encode(TokenRequest(experiment=experiment, valid_s=valid_s, name=name))
        try:
            reply = await self._thread.run(lambda: self._post(WORKER_TOKENS, body))
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise self._unreachable("make_worker_token", error) from error
        if reply.status == 200:
            return msgspec.json.decode(reply.body, type=IssuedToken).token
        text = error_text(reply.body)
        if reply.status in (401, 403):
            raise self._refused(Fault(type="TokenError", message=text)) if reply.status == 401 else TokenError(text)
        raise StoreError(f"the gateway {self._url} makes no token: {text}")

    async def close(self) -> None:
        """Close the connections; waiting calls end with :class:`~agl.errors.StoreError`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        session = self._session
        if session is not None:
            await self._thread.run(session.close)
        await self._thread.stop()

    async def call(self, method: Method, params: dict[str, Any]) -> Any:
        """Call a method of the store contract; ``params`` maps the method's parameter names to the arguments."""
        if self._is_closed:
            raise StoreError(f"the store {self._url} was closed; open it again to use it")
        self._thread.start()
        try:
            return await self._thread.run(lambda: self._ask(method, params))
        except asyncio.CancelledError:
            if self._is_closed:
                raise StoreError(f"the store {self._url} was closed while {method.name!r} waited") from None
            raise

    async def _ask(self, method: Method, params: dict[str, Any]) -> Any:
        """Send a request and return the result; a long wait is split into several requests."""
        deadline = time.monotonic() + params.get("wait_s", 0.0)
        while True:
            if method.is_waiting:
                params["wait_s"] = min(MAX_WAIT_S, max(0.0, deadline - time.monotonic()))
            result = await self._ask_once(method, self._body(method.name, params))
            if result or not method.is_waiting or time.monotonic() >= deadline:
                return result

    def _body(self, name: str, params: dict[str, Any]) -> bytes:
        try:
            return self._encode(params)
        except (TypeError, ValueError, OverflowError) as error:
            raise StoreError(
                f"{name!r} cannot be sent to the store {self._url}: {error}; values must be JSON"
            ) from error

    async def _ask_once(self, method: Method, body: bytes) -> Any:
        pauses = Pauses()
        while True:
            try:
                reply = await self._post(f"/store/{method.name}", body)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                is_final = isinstance(error, aiohttp.InvalidURL) or (
                    not self._has_answered and refusal_of(error, self._ca)
                )
                pause_s = None if is_final else pauses.next_s(self._delays(method))
                if pause_s is None:
                    raise self._unreachable(method.name, error) from error
            else:
                if not reply.is_passing:
                    self._has_answered = True
                    return self._result(method.name, reply)
                self._has_answered = self._has_answered or reply.fault() is not None
                pause_s = pauses.next_s(self._delays(method), asked_s=reply.retry_after_s)
                if pause_s is None:
                    raise self._away(method.name, reply)
            await asyncio.sleep(pause_s)

    def _delays(self, method: Method) -> Sequence[float]:
        if self._is_closed or not method.is_repeatable:
            return ()
        return (*RETRY_DELAYS_S, *RESTART_DELAYS_S) if self._has_answered else RETRY_DELAYS_S

    async def _post(self, path: str, body: bytes) -> StoreReply:
        session = self._session
        if session is None:
            session = self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._context or True),
                timeout=aiohttp.ClientTimeout(total=_REPLY_S, sock_connect=_CONNECT_S),
                headers={"content-type": _MSGPACK},
            )
        headers = {"authorization": f"Bearer {self._key()}"}
        data = io.BytesIO(body) if len(body) > _LARGE_BYTES else body
        async with session.post(f"{self._url}{path}", data=data, headers=headers) as reply:
            return StoreReply(
                status=reply.status, body=await reply.read(), retry_after=reply.headers.get("retry-after", "")
            )

    def _result(self, name: str, reply: StoreReply) -> Any:
        try:
            if reply.status == 200:
                return self._decoders[name].decode(reply.body)
            fault = msgspec.msgpack.decode(reply.body, type=Fault)
        except msgspec.DecodeError as error:
            raise StoreError(
                f"{self._url} answered HTTP {reply.status} with {reply.start!r}, which is not a store's answer; "
                "check that this is the address of `agl serve`, and that both are of the same release"
            ) from error
        raise self._refused(fault) if reply.status == 401 else error_of(fault)

    def _refused(self, fault: Fault) -> TokenError:
        """Return the error for a token that the server does not accept; its message says how to get a valid one."""
        reason = fault.message.split(". ")[0]
        if isinstance(self._key, WorkerKey):
            return TokenError(f"the store {self._url} refuses the token in {WORKER_TOKEN_ENV} or in its file: {reason}")
        if isinstance(self._key, AdminKey):
            return TokenError(
                f"the store {self._url} refuses the token signed with this machine's {SECRET_ENV}: {reason}. Set "
                f"{SECRET_ENV} to the secret that it runs with, or AGL_TOKEN to the token in `agl serve`'s token file"
            )
        return TokenError(
            f"the store {self._url} refuses the token in AGL_TOKEN or in its URL: {reason}. Set AGL_TOKEN to the token "
            f"in `agl serve`'s token file, which it names as it starts, or unset it and set {SECRET_ENV} to the secret "
            "that it runs with"
        )

    def _away(self, name: str, reply: StoreReply) -> StoreError:
        """Return the error for a store that is temporarily unavailable, with the text that it or a balancer sent."""
        if self._is_closed:
            return StoreError(f"the store {self._url} was closed while {name!r} waited")
        found = f"the store {self._url} answers HTTP {reply.status} for {name!r}"
        if (fault := reply.fault()) is not None:
            return StoreError(f"{found}: {fault.message}")
        return StoreError(
            f"{found}, with {reply.start!r}; check that `agl serve` runs there, and that a balancer before it finds it"
        )

    def _unreachable(self, name: str, error: Exception) -> StoreError:
        if self._is_closed:
            return StoreError(f"the store {self._url} was closed while {name!r} waited")
        if refusal := refusal_of(error, self._ca):
            return StoreError(f"the store {self._url} cannot be reached: {refusal}")
        return StoreError(
            f"the store {self._url} cannot be reached ({error or type(error).__name__}) for {name!r}; "
            "check that `agl serve` runs there and that the port is open"
        )


def _sender(method: Method) -> Callable[..., Awaitable[Any]]:
    """Return the method of :class:`HttpStore` that sends ``method``; omitted arguments get the server's defaults."""

    @functools.wraps(getattr(Store, method.name))
    async def send(self: HttpStore, *values: Any, **params: Any) -> Any:
        return await self.call(method, params | dict(zip(method.positional, values, strict=False)))

    return send


for _name, _method in METHODS.items():
    if _name not in vars(HttpStore):
        setattr(HttpStore, _name, _sender(_method))


def error_text(answer: bytes) -> str:
    """Return the message of a gateway's error, or the first 120 bytes of any other answer."""
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return repr(answer[:120].decode("utf-8", "replace"))


def _parts(url: str) -> SplitResult:
    if (parts := web_parts(url)) is None:
        raise ConfigError(f"the store's URL {shown_url(url)!r} is not an http(s) URL; write http://HOST:PORT")
    return parts


def _trust_of(parts: SplitResult) -> tuple[str, ssl.SSLContext | None]:
    """Return the authorities' file from the URL, and the TLS context to verify the server; ``None`` without TLS.

    Raises:
        ConfigError: The file cannot be used, or the URL has unknown settings, or names authorities without TLS.
    """
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    ca = given.pop("ca", "")
    if given or (ca and parts.scheme == "http"):
        wrong = f"has the setting {next(iter(given))!r}" if given else "names authorities with ca, and has no TLS"
        raise ConfigError(
            f"the store's URL {without_credentials(parts._replace(query='').geturl())!r} {wrong}; write "
            "https://HOST:PORT?ca=FILE, or leave the part after ? away"
        )
    return ca, client_context(ca) if parts.scheme == "https" else None


def _key_of(given: str) -> Callable[[], str] | None:
    """Return a function that returns the API key for a request.

    The key is ``given`` or comes from the environment; the result is ``None`` if there is neither.
    """
    if given:
        return lambda: given
    if key := worker_key():
        return key
    if keys := named_keys(ADMIN_ENV, purpose="admin token"):
        return lambda: keys().splitlines()[0].decode("utf-8", "replace")
    return AdminKey(signing_keys()) if is_secret_given() else None
