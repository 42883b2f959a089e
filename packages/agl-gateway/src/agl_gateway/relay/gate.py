"""Pauses, drains and resumes calls around weight updates. Calls are held, never refused."""

import asyncio


class Gate:
    """Passes or holds the calls of one policy. Used in one event loop only."""

    def __init__(self, *, model: str = "", model_version: str = "") -> None:
        self.model = model
        self.model_version = model_version
        self.in_flight = 0
        self.held = 0
        self.total = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def enter(self) -> str:
        """Wait until the gate is open; returns the version that serves then. Pair with :meth:`leave`."""
        if not self._open.is_set():
            self.held += 1
            try:
                await self._wait_open()
            finally:
                self.held -= 1
        self.in_flight += 1
        self.total += 1
        self._idle.clear()
        return self.model_version

    async def _wait_open(self) -> None:
        while not self._open.is_set():
            await self._open.wait()

    def leave(self) -> None:
        """Record the end of a call that entered."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    async def pause(self, *, drain_s: float) -> bool:
        """Hold new calls; wait up to ``drain_s`` seconds for those in flight. Returns true if all ended."""
        self._open.clear()
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def resume(self, *, model_version: str = "", model: str = "") -> None:
        """Open the gate. A non-empty version or model replaces the one that calls carry and request."""
        self.model_version = model_version or self.model_version
        self.model = model or self.model
        self._open.set()
