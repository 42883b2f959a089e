"""Runs an HTTP application on an event loop and a thread of its own, so that no caller's blocking work delays it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from aiohttp import web

from agl.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable


class ServerThread:
    """An aiohttp server on an event loop and a thread of its own."""

    def __init__(self, make_app: Callable[[], web.Application], *, host: str, port: int) -> None:
        self._make_app, self._host, self._port = make_app, host, port
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="agl-policy-server", daemon=True)

    def start(self) -> int:
        """Listen and return the port; raises PolicyError when the address is taken. Call it once."""
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise PolicyError(
                f"The policy server cannot listen on {self._host}:{self._port}: {self._error}. "
                "Choose another port, or 0 for a free one."
            ) from self._error
        return self._port

    def stop(self) -> None:
        """Close connections and end the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._ready.set()

    async def _serve(self) -> None:
        runner = web.AppRunner(
            self._make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0, auto_decompress=False
        )
        await runner.setup()
        try:
            await self._listen(runner)
            self._ready.set()
            if self._error is None:
                await self._stopped.wait()
        finally:
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> None:
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            self._error = error
            return
        self._port = int(runner.addresses[0][1])
