"""Pause, drain and resume around weight updates: calls are held, never refused."""

import asyncio


class Gate:
    """Lets the calls of one policy through, or holds them. Used in one event loop only."""

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

    @property
    def is_paused(self) -> bool:
        """Whether new calls are held."""
        return not self._open.is_set()

    async def enter(self) -> str:
        """Wait until calls are let through; returns the version that serves then. Pair with :meth:`leave`."""
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
        """A call that entered has ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    async def pause(self, *, drain_s: float) -> bool:
        """Hold new calls; wait up to ``drain_s`` seconds for those in flight. Returns whether all ended."""
        self._open.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), drain_s)
        except TimeoutError:
            return False
        return True

    def resume(self, *, model_version: str = "", model: str = "") -> None:
        """Let calls through; they carry the version and ask for the model, where these are not empty."""
        self.model_version = model_version or self.model_version
        self.model = model or self.model
        self._open.set()
