"""The gateway beside an experiment: in a thread and an event loop of its own, so that agents cannot block it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from agl.capture.token import AttemptTokens
from agl.contracts import Store, Upstream
from agl.errors import CaptureError, ConfigError
from agl_gateway.gate import Gate
from agl_gateway.service import GatewayService, Settings

T = TypeVar("T")


class EmbeddedGateway:
    """Implements :class:`agl.contracts.Gateway`. Its methods may be called from any event loop.

    Args:
        host: Address to bind.
        port: 0 for any free one.
        timeout_s: Seconds of silence after which a backend counts as gone.
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 600.0) -> None:
        self._settings = Settings(host=host, port=port, timeout_s=timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._service: GatewayService | None = None

    async def start(self, *, store: Store, upstreams: Sequence[Upstream], secret: bytes) -> str:
        """Listen; returns the base URL without ``/v1``."""
        if self._loop is not None:
            raise CaptureError("this gateway has been started already; stop it first, or make another one")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="agl-gateway", daemon=True)
        self._thread.start()
        tokens = AttemptTokens(secret)
        try:
            return await self._call(lambda: self._start(store, upstreams, tokens))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Finish what is recorded, then close; idempotent."""
        if self._loop is None or self._thread is None:
            return
        try:
            await self._call(self._stop)
        finally:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join)

    async def pause(self, policy: str, *, drain_s: float = 30.0) -> None:
        """Hold new calls of ``policy`` and wait up to ``drain_s`` seconds for those in flight."""
        await self._call(lambda: self._gate(policy).pause(drain_s=drain_s))

    async def resume(self, policy: str, *, model_version: str = "") -> None:
        """Let held calls through; they carry ``model_version``."""

        async def resume() -> None:
            self._gate(policy).resume(model_version=model_version)

        await self._call(resume)

    async def settle(self, attempt_id: str) -> None:
        """Return once every call of the attempt that was answered is in the store."""
        await self._call(lambda: self._running().recorder.settle(attempt_id))

    async def _start(self, store: Store, upstreams: Sequence[Upstream], tokens: AttemptTokens) -> str:
        self._service = GatewayService(store=store, upstreams=upstreams, tokens=tokens, settings=self._settings)
        return await self._service.start()

    async def _stop(self) -> None:
        if self._service is not None:
            await self._service.stop()
            self._service = None

    def _running(self) -> GatewayService:
        if self._service is None:
            raise CaptureError("the gateway is not running; start it first")
        return self._service

    def _gate(self, policy: str) -> Gate:
        gates = self._running().relay.gates
        if policy not in gates:
            raise ConfigError(f"the gateway serves no policy {policy!r}; it knows {sorted(gates)}")
        return gates[policy]

    async def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the gateway's loop and wait for it in the caller's."""
        if self._loop is None:
            raise CaptureError("the gateway is not running; start it first")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), self._loop))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
