"""The samplers of a server: one for every set of weights that clients sample from, the latest few of them ready."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from agl_algo_torch.serving.hosting import HostedModel, Sampler

Key = tuple[Path | None, int]
"""The folder of the weights and the time when they were written, since a name may be used again after a removal."""


class Samplers:
    """Ready samplers by their weights. Used in one event loop.

    Args:
        model: The base model.
        most: Samplers that stay ready; an idle one that was not asked for the longest is closed for a new one.
    """

    def __init__(self, model: HostedModel, *, most: int) -> None:
        self._model, self._most = model, most
        self._ready: OrderedDict[Key, Sampler] = OrderedDict()
        self._users: dict[Key, int] = {}
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def using(self, folder: Path | None) -> AsyncGenerator[Sampler]:
        """Return the sampler of a checkpoint's folder, or of the base; it stays open within the block."""
        key = (folder, folder.stat().st_mtime_ns if folder is not None else 0)
        self._users[key] = self._users.get(key, 0) + 1
        try:
            yield await self._open(key)
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]

    async def close(self) -> None:
        """Close all of them."""
        async with self._opening:  # one that is being opened is closed too
            while self._ready:
                _, sampler = self._ready.popitem()
                await asyncio.to_thread(sampler.close)

    async def _open(self, key: Key) -> Sampler:
        # Shielded: a request that is cancelled leaves the sampler to the next one, and none that nobody closes.
        return await asyncio.shield(self._opened(key))

    async def _opened(self, key: Key) -> Sampler:
        async with self._opening:  # else two requests for new weights would read them twice
            if key not in self._ready:
                await self._make_room()
                self._ready[key] = await asyncio.to_thread(self._model.sampler, key[0])
            self._ready.move_to_end(key)
            return self._ready[key]

    async def _make_room(self) -> None:
        idle = [key for key in self._ready if key not in self._users]
        for key in idle[: max(0, len(self._ready) + 1 - self._most)]:
            await asyncio.to_thread(self._ready.pop(key).close)
