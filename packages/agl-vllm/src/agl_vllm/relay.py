"""Stands between the gateway and the vLLM servers, and sends prompts as the tokens that were recorded.

The relay has one address per server. Chat calls are answered by `tokens.py`; all other requests are passed on
unchanged. If a server does not answer, the relay closes the client's connection, so the gateway sends the call to
another server. Other content than a JSON object is passed on, so that the server itself refuses it.

The relay runs an event loop in its own thread, so that a busy agent delays no answer.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from agl_vllm.tokens import TokenCalls

_MAX_BODY = 256 * 2**20
_HOP = frozenset(("connection", "content-encoding", "content-length", "date", "host", "server", "transfer-encoding"))
"""Headers that concern a single connection, and are not passed on."""


class TokenRelay:
    """Relays calls to servers.

    Args:
        roots: The servers' URLs, without ``/v1``.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agl-vllm-relay", daemon=True)
        self._runners: list[web.AppRunner] = []
        self._session: aiohttp.ClientSession | None = None
        self._calls: TokenCalls | None = None

    @property
    def counts(self) -> Counter[str]:
        """Chat calls so far: the calls with a spliced prompt, and all others by reason; see :class:`TokenCalls`."""
        return Counter(self._calls.counts) if self._calls is not None else Counter()

    async def start(self) -> list[str]:
        """Start to listen on this machine; returns an address with ``/v1`` for each server."""
        self._thread.start()
        return await self._there(self._start())

    async def stop(self) -> None:
        """Stop listening; idempotent."""
        if not self._thread.is_alive():
            return
        await self._there(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _there(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _start(self) -> list[str]:
        # No timeout: the gateway has one, and closes its connection then.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._calls = TokenCalls(self._session)
        return [await self._listen(_Site(root, self._session, self._calls)) for root in self._roots]

    async def _listen(self, site: "_Site") -> str:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_post("/v1/chat/completions", site.chat)
        app.router.add_route("*", "/{path:.*}", site.passed_on)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def _stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()
        if self._session is not None:
            await self._session.close()


class _Site:
    """The relay's handlers for one server."""

    def __init__(self, root: str, session: aiohttp.ClientSession, calls: TokenCalls) -> None:
        self._root, self._session, self._calls = root, session, calls

    async def chat(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() == "authorization"}
        try:
            answer = await self._calls.respond(self._root, await request.read(), headers)
        except (aiohttp.ClientError, OSError):
            return _hung_up(request)
        return await self.passed_on(request) if answer is None else answer

    async def passed_on(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url, content = f"{self._root}{request.rel_url}", await request.read()
        reply = web.StreamResponse()
        try:
            async with self._session.request(request.method, url, data=content, headers=headers) as answer:
                reply.set_status(answer.status)
                reply.headers.update({name: v for name, v in answer.headers.items() if name.lower() not in _HOP})
                await reply.prepare(request)
                async for part in answer.content.iter_any():
                    await reply.write(part)
        except (aiohttp.ClientError, OSError):
            return _hung_up(request)
        await reply.write_eof()
        return reply


def _hung_up(request: web.Request) -> web.StreamResponse:
    """Close the client's connection without ending the answer, as the server did."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)
