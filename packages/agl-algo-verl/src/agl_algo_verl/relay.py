"""One address in front of VERL's replicas, which come and go with its cluster.

Calls of one conversation go to one replica, chosen by its first messages: so does every rollout, and rollouts of one
task share its cached prefix. A replica that cannot be reached, or hangs up before it answers, is left out and the
call goes to the next; nothing was answered then, so nothing is recorded twice. Answers are passed on as they arrive.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from aiohttp import web

from agl.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

MAX_BODY = 64 * 2**20
CONNECT_S = 5.0
"""Seconds to wait for a replica's connection before the next is asked."""

DROPPED = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Who serves: base URLs with `/v1`, and the model name that they know."""

    urls: tuple[str, ...]
    model: str


class Relay:
    """Listens and passes on; all methods belong to one event loop.

    Args:
        backend: Who serves now; may start it. An error of it is the call's answer.
    """

    def __init__(self, backend: Callable[[], Awaitable[Backend]]) -> None:
        self._backend = backend
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S))
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening; idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        self._runner = self._session = None

    async def model_of(self, url: str) -> str:
        """Return the name under which a server knows its model; raises PolicyError when it does not say."""
        session = cast("aiohttp.ClientSession", self._session)
        try:
            async with session.get(f"{url}/models") as reply:
                return str((await reply.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise PolicyError(
                f"VERL's replica at {url} does not say which model it serves ({type(error).__name__}: {error}). "
                "Can this machine reach that address?"
            ) from error

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            backend = await self._backend()
        except Exception as error:  # noqa: BLE001 - isolation point: the agent is told why nobody serves
            return _problem(503, f"nobody serves this model: {error}")
        body, key = _rewritten(await request.read(), backend.model)
        for url in in_order(backend.urls, key):
            try:
                return await self._pass_on(request, f"{url}/{request.match_info['path'].removeprefix('v1/')}", body)
            except (aiohttp.ClientConnectionError, TimeoutError):
                self.failures[url] += 1
        return _problem(502, f"none of VERL's replicas can be reached: {', '.join(backend.urls)}")

    async def _pass_on(self, request: web.Request, url: str, body: bytes) -> web.StreamResponse:
        """Raise aiohttp.ClientConnectionError while nothing was answered yet."""
        session = cast("aiohttp.ClientSession", self._session)
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        async with session.request(request.method, url, data=body or None, headers=headers) as reply:
            self.calls[url] += 1
            passed = {name: value for name, value in reply.headers.items() if name.lower() not in DROPPED}
            response = web.StreamResponse(status=reply.status, headers=passed)
            first = await reply.content.readany()
            try:
                await response.prepare(request)
                await response.write(first)
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            except (aiohttp.ClientError, ConnectionError):  # either end hung up; the other learns it the same way
                if request.transport is not None:
                    request.transport.close()
            return response


def in_order(urls: Sequence[str], key: str) -> list[str]:
    """The URLs in the order in which a conversation asks them (rendezvous hashing: few move when one goes)."""
    return sorted(urls, key=lambda url: hashlib.blake2b(f"{key}|{url}".encode(), digest_size=8).digest())


def _rewritten(body: bytes, model: str) -> tuple[bytes, str]:
    """The body with the model name that the replicas know, and what tells conversations apart."""
    try:
        content: Any = json.loads(body)
    except ValueError:
        return body, ""
    if not isinstance(content, dict):
        return body, ""
    fields = cast("dict[str, Any]", content)
    messages = cast("list[Any]", fields.get("messages") or [])
    start: Any = messages[:2] or fields.get("prompt") or fields.get("input") or ""
    return json.dumps(fields | {"model": model}).encode(), json.dumps(start)


def _problem(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "server_error"}}, status=status)
