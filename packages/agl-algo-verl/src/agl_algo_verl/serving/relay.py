"""One address in front of VERL's replicas, which come and go with its cluster.

Each call goes to the replica that has read its conversation so far, unless that replica is busier than the others. If a
replica cannot be reached, or closes the connection before it answers, the call goes to the next one. Nothing was
answered then, so nothing is recorded twice. If all replicas are gone, calls wait, so no agent fails for that. The relay
runs in a separate process (`relay_program.py`), which its owner starts and watches (`relay_process.py`).

If the replicas take prompts of token ids, a later turn of a conversation is sent as the recorded tokens of the earlier
ones and the tokens of the new text (`agl_vllm.tokens`), whichever replica answered them.

Other answers are passed on as they arrive, and only the outermost fields of their bodies are parsed and written. If an
answer does not name the version of the weights, the relay adds it, because a held call may reach newer weights than
were live when the agent made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import aiohttp
import msgspec
from aiohttp import web

from agl.contracts import POLICY_KEY_ENV
from agl.errors import PolicyError
from agl.served_calls import CallGate
from agl_algo_verl.serving.replicas import Balance, digests
from agl_vllm.tokens import TokenCalls

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

MAX_BODY = 64 * 2**20
"""The largest request, in bytes."""

CONNECT_S = 5.0
"""Seconds to wait for a replica's connection before the next is asked."""

DRAIN_S = 60.0
"""Seconds for which calls in flight may continue when the relay stops."""

VERSION_FIELDS = frozenset({"model_version", "model_versions", "weight_versions"})
"""Fields of an answer in which servers name the version of their weights."""

CONNECTION_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding"})
"""Headers that are not passed on: they belong to one connection, or to a body that may be rewritten."""


HANG_UPS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError)
"""Errors of a replica that is unreachable, disconnects before or after its headers, or does not speak HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The servers to which calls are sent.

    Attributes:
        urls: The servers' base URLs, including `/v1`.
        model: The model name under which they serve.
        version: The version of their weights; `""` if unknown.
        is_awaited: True if calls wait for other servers once none of these can be reached.
        key: Their API key; `""` for none.
        takes_tokens: True if they take prompts of token ids as vLLM does.
    """

    urls: tuple[str, ...]
    model: str
    version: str = ""
    is_awaited: bool = False
    key: str = ""
    takes_tokens: bool = False


class ReplicaRelay:
    """Listens on one address and passes calls on; all methods belong to one event loop.

    Args:
        home: Returns the server for calls while there are no replicas, and may start it; if it raises an error, the
            error becomes the call's answer.
        key: API key that calls must carry.

    Attributes:
        lost: Set while no replica can be reached and calls wait for others.
        calls: The number of answers of each replica, by URL.
        balance: Chooses the replicas, and counts the times that each could not be reached.
        gate: Lets calls pass, or holds them while weights change.
    """

    def __init__(self, home: Callable[[], Awaitable[Backend]], *, key: str) -> None:
        self._home, self._key = home, key.encode()
        self._backend: Backend | None = None
        self._session: aiohttp.ClientSession | None = None
        self._turns: TokenCalls | None = None
        self._runner: web.AppRunner | None = None
        self._is_over = False
        self.balance = Balance()
        self.gate = CallGate()
        self.lost = asyncio.Event()
        self.calls: Counter[str] = Counter()

    async def start(self, listener: socket.socket) -> None:
        """Answer calls that arrive at the socket `listener`; `stop` closes it."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S), connector=aiohttp.TCPConnector(limit=0)
        )
        self._turns = TokenCalls(self._session)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # A call whose client has disconnected ends at the replica too, so that a change of weights does not wait for
        # it.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=DRAIN_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    def use(self, backend: Backend | None) -> None:
        """Send calls to these servers from now on, or to `home` if None, including calls that were held.

        Calls that wait because their replicas are gone keep waiting for other replicas.
        """
        self._backend = backend
        if backend is not None:
            self.lost.clear()
        if not self.lost.is_set():
            self.gate.resume()

    async def stop(self) -> None:
        """Stop listening, and wait for the calls in flight; held calls are refused. Idempotent."""
        self._is_over = True
        self.gate.resume()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        sent = request.headers.get("authorization", "").partition(" ")[2].strip()
        if not hmac.compare_digest(sent.encode("utf-8", "replace"), self._key):
            return _error_response(401, f"this policy asks for its key, which its process has as {POLICY_KEY_ENV}")
        content = await request.read()
        while True:
            async with self.gate.passed():
                if self._is_over:
                    return _error_response(503, "the policy has stopped")
                try:
                    backend = self._backend or await self._home()
                except Exception as error:  # noqa: BLE001 - isolation point: the agent learns why no model serves
                    return _error_response(503, f"nobody serves this model: {error}")
                answer = await self._ask(request, content, backend)
            if answer is not None:
                return answer

    async def _ask(self, request: web.Request, content: bytes, backend: Backend) -> web.StreamResponse | None:
        """Send a call to the replicas in turn until one answers; None if all are gone and the call has to wait."""
        body, opening = _addressed(content, backend.model)
        path = request.match_info["path"].removeprefix("v1/")
        load = self.balance.load
        for url in self.balance.ranked(backend.urls, opening):
            load.in_flight[url] += 1
            try:
                answer = await self._pass_on(request, f"{url}/{path}", body, backend=backend)
            except (*HANG_UPS, TimeoutError):
                load.failed(url)
                continue
            finally:
                load.in_flight[url] -= 1
            self.balance.answered(url, opening)
            return answer
        if backend.is_awaited and not await self._any_answers(backend):
            self.gate.close()
            self.lost.set()
            return None
        return _error_response(502, f"none of the replicas can be reached: {', '.join(backend.urls)}")

    async def _any_answers(self, backend: Backend) -> bool:
        session = cast("aiohttp.ClientSession", self._session)
        for url in backend.urls:
            with contextlib.suppress(PolicyError):
                await model_of(session, url, key=backend.key)
                return True
        return False

    async def _pass_on(self, request: web.Request, url: str, body: bytes, *, backend: Backend) -> web.StreamResponse:
        """Send a call to a replica and pass its answer on.

        Raises one of `HANG_UPS` only if no part of the answer was passed on.
        """
        session, version = cast("aiohttp.ClientSession", self._session), backend.version
        root = url.removesuffix("/v1/chat/completions")
        if backend.takes_tokens and root != url and self._turns is not None:
            answer = await self._turns.respond(root, body, _authorization(backend.key))
            if answer is not None:
                self.calls[url] += 1
                if version and isinstance(answer.body, bytes):
                    answer.body = _versioned(answer.body, version, kind=answer.content_type)
                return answer
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        headers |= _authorization(backend.key)
        async with session.request(request.method, url, data=body or None, headers=headers) as reply:
            passed = {name: value for name, value in reply.headers.items() if name.lower() not in CONNECTION_HEADERS}
            response = web.StreamResponse(status=reply.status, headers=passed)
            first = await _first_bytes(reply, version) if version else await reply.content.readany()
            self.calls[url] += 1
            try:
                await response.prepare(request)
                await response.write(first)
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            except (aiohttp.ClientError, ConnectionError):  # either end hung up, so hang up at the other
                if request.transport is not None:
                    request.transport.close()
            return response


async def model_of(session: aiohttp.ClientSession, url: str, *, key: str) -> str:
    """Return the name of the model that a server reports; raises PolicyError if it reports none."""
    try:
        async with session.get(f"{url}/models", headers=_authorization(key)) as reply:
            return str((await reply.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise PolicyError(
            f"VERL's replica at {url} does not say which model it serves ({type(error).__name__}: {error}). "
            "Can this machine reach that address?"
        ) from error


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _addressed(body: bytes, model: str) -> tuple[bytes, list[bytes]]:
    """Return the request body with the replicas' model name, and the digests of the request's messages."""
    fields = _fields(body)
    if fields is None:
        return body, []
    named = msgspec.Raw(msgspec.json.encode(model))
    opening = digests(_parts(fields.get("messages") or fields.get("input") or fields.get("prompt")))
    return body if fields.get("model") == named else msgspec.json.encode(fields | {"model": named}), opening


def _parts(opening: msgspec.Raw | None) -> list[bytes]:
    """Return the elements of a JSON list as bytes; a string or a list of token ids counts as one element."""
    if opening is None:
        return []
    written = bytes(opening)
    if written[:1] != b"[" or written[1:16].lstrip()[:1].isdigit():
        return [written]
    return [bytes(part) for part in msgspec.json.decode(written, type=list[msgspec.Raw])]


def _fields(body: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the fields of a JSON object, each as bytes; None for other values, and for JSON nested too deep."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None


async def _first_bytes(reply: aiohttp.ClientResponse, version: str) -> bytes:
    """Return the start of an answer with the version added: all of a JSON object, or the first event of a stream."""
    if reply.content_type == "application/json":
        return _versioned(await reply.read(), version, kind=reply.content_type)
    if reply.content_type != "text/event-stream":
        return await reply.content.readany()
    head = b""
    while b"\n" not in head and (chunk := await reply.content.readany()):
        head += chunk
    return _versioned(head, version, kind=reply.content_type)


def _versioned(head: bytes, version: str, *, kind: str) -> bytes:
    """Return a JSON object, or a stream's first events, with the version added; `kind` is the content type."""
    if kind == "application/json":
        return with_version(head, version)
    line, end, rest = head.partition(b"\n")
    prefix, _, event = line.partition(b" ")
    return (b"data: " + with_version(event, version) if prefix == b"data:" else line) + end + rest


def with_version(body: bytes, version: str) -> bytes:
    """Return a JSON object with `model_version` added; unchanged if it names a version, or is not an object."""
    fields = _fields(body)
    if fields is None or not VERSION_FIELDS.isdisjoint(fields):
        return body
    return msgspec.json.encode(fields | {"model_version": msgspec.Raw(msgspec.json.encode(version))})


def _error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "server_error"}}, status=status)
