"""The samplers of a server: one for every set of weights that clients sample from, the latest few of them ready."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from agl_algo_torch.hosting import HostedModel, Sampler


class Samplers:
    """Ready samplers by their weights. Used in one event loop.

    Args:
        model: The base model.
        most: Samplers that stay ready; an idle one that was not asked for the longest is closed for a new one.
    """

    def __init__(self, model: HostedModel, *, most: int) -> None:
        self._model, self._most = model, most
        self._ready: OrderedDict[Path | None, Sampler] = OrderedDict()
        self._users: dict[Path | None, int] = {}
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def using(self, folder: Path | None) -> AsyncGenerator[Sampler]:
        """Return the sampler of a checkpoint's folder, or of the base; it stays open within the block."""
        self._users[folder] = self._users.get(folder, 0) + 1
        try:
            yield await self._open(folder)
        finally:
            self._users[folder] -= 1
            if not self._users[folder]:
                del self._users[folder]

    async def close(self) -> None:
        """Close all of them."""
        while self._ready:
            _, sampler = self._ready.popitem()
            await asyncio.to_thread(sampler.close)

    async def _open(self, folder: Path | None) -> Sampler:
        async with self._opening:  # else two requests for new weights would read them twice
            if folder not in self._ready:
                await self._make_room()
                self._ready[folder] = await asyncio.to_thread(self._model.sampler, folder)
            self._ready.move_to_end(folder)
            return self._ready[folder]

    async def _make_room(self) -> None:
        idle = [folder for folder in self._ready if folder not in self._users]
        for folder in idle[: max(0, len(self._ready) + 1 - self._most)]:
            await asyncio.to_thread(self._ready.pop(folder).close)
