"""A server in a thread of this process, and a call of a policy's endpoint."""

import asyncio
import os
import threading
from typing import Any

import aiohttp
from aiohttp import web

from agl.contracts import POLICY_KEY_ENV
from agl_tinker.server.running import ServeSettings, listen, make_app

KEY = "tml-key-of-the-tests"


class Served:
    """A server on its own event loop in its own thread."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self.url = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app, self.name = make_app(self._settings, key=KEY)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, auto_decompress=False)
        await runner.setup()
        self.url = await listen(runner, host="127.0.0.1", port=self._settings.port)
        self._ready.set()
        await self._stopped.wait()
        await runner.cleanup()


async def complete(endpoint: str, path: str = "completions", **body: Any) -> Any:
    """Call a policy's endpoint with token ids, and return the answer."""
    headers = {"authorization": f"Bearer {os.environ[POLICY_KEY_ENV]}"}
    content = {"return_token_ids": True, "logprobs": 1, **body}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{endpoint}/{path}", json=content) as answer,
    ):
        assert 200 == answer.status, await answer.text()
        return await answer.json()
