"""The published client of Tinker's API; its errors are raised as our own.

The client's telemetry is turned off unless the environment turns it on. All coroutines here work in any event loop.
"""

import asyncio
import os
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import tinker

from agl.errors import PolicyError

T = TypeVar("T")
LORA = "lora"


class Connection:
    """One session with a server; must be closed.

    Args:
        base_url: The server's URL.
        key: The API key.
        project_id: The session's project at Tinker; ``""`` for the default project.
    """

    def __init__(self, base_url: str, *, key: str, project_id: str = "") -> None:
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        self.base_url = base_url
        self._service = tinker.ServiceClient(base_url=base_url, api_key=key, project_id=project_id or None)
        self._is_open = False

    async def open(self) -> None:
        """Begin the session; raises :class:`PolicyError` if the server refuses or does not answer."""
        with described(f"the server at {self.base_url} does not begin a session"):
            await asyncio.to_thread(lambda: self._service.holder)  # begins the session, and blocks
        self._is_open = True

    async def close(self) -> None:
        """End the session; a server that does not answer is ignored. Idempotent."""
        if self._is_open:
            self._is_open = False
            try:
                await asyncio.wait_for(_awaited(self._service.close("success")), 10.0)
            except (tinker.TinkerError, TimeoutError, RuntimeError):
                return

    async def new_model(self, base_model: str, *, rank: int, seed: int) -> tinker.TrainingClient:
        """Return a client that trains fresh adapters; raises :class:`PolicyError` if the server refuses."""
        with described(f"the server at {self.base_url} makes no LoRA adapters of rank {rank} for {base_model!r}"):
            return await self._service.create_lora_training_client(base_model, rank=rank, seed=seed)

    async def restored_model(self, path: str) -> tinker.TrainingClient:
        """Return a client that continues to train a saved state with its moments.

        Raises:
            PolicyError: The server refuses.
        """
        with described(f"the server at {self.base_url} does not restore the state {path!r}"):
            return await self._service.create_training_client_from_state_with_optimizer(path)

    async def sampler(self, *, base_model: str, path: str = "") -> tinker.SamplingClient:
        """Return a client that samples from saved weights, or without ``path`` from the base model.

        Raises:
            PolicyError: The server refuses.
        """
        with described(f"the server at {self.base_url} does not sample from {path or base_model!r}"):
            if path:
                return await self._service.create_sampling_client(model_path=path)
            return await self._service.create_sampling_client(base_model=base_model)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


@contextmanager
def described(text: str) -> Generator[None]:
    """Convert errors of the published client within the block to a :class:`PolicyError` that begins with ``text``."""
    try:
        yield
    except (tinker.TinkerError, ValueError, RuntimeError, AssertionError) as error:
        cause: Any = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        raise PolicyError(f"{text}: {cause}") from error
