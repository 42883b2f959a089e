"""Updating one server: requests to the server are held only during the update, however the update ends."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agl.errors import PolicyError
from agl.schemas import Weights
from agl_vllm.client import ServerClient
from agl_vllm.update import reload_weights, run_together

WEIGHTS = Weights(uri="/weights")


class Server:
    """A server that holds requests between `/pause` and `/resume`; `/pause` returns once `drained` is set."""

    def __init__(self, *, status=200):
        self.status, self.is_held = status, False
        self.asked, self.drained = asyncio.Event(), asyncio.Event()

    async def pause(self, _request):
        self.is_held = True
        self.asked.set()
        await self.drained.wait()
        return web.Response(status=self.status, text="the engine is busy")

    async def resume(self, _request):
        self.is_held = False
        return web.Response()


@asynccontextmanager
async def running(server):
    app = web.Application()
    app.router.add_post("/pause", server.pause)
    app.router.add_post("/resume", server.resume)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def test_server_that_does_not_pause_in_time_is_not_held():
    async def run():
        server = Server()
        async with running(server) as url:
            with pytest.raises(PolicyError, match=r"did not answer .*/pause"):
                await reload_weights(ServerClient(url, timeout_s=0.2), WEIGHTS)
        return server.is_held

    assert not asyncio.run(run())


def test_servers_whose_update_is_given_up_for_the_failure_of_another_are_not_held():
    async def run():
        failing, waiting = Server(status=500), Server()
        async with running(failing) as first, running(waiting) as second:
            update = asyncio.ensure_future(
                run_together(reload_weights(ServerClient(url), WEIGHTS) for url in (first, second))
            )
            await waiting.asked.wait()
            failing.drained.set()
            with pytest.raises(PolicyError, match="the engine is busy"):
                await update
        return failing.is_held, waiting.is_held

    assert (False, False) == asyncio.run(run())
