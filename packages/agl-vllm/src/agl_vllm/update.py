"""New weights into one running server, between answers and never within one."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from agl.errors import PolicyError
from agl.schemas import Weights
from agl_vllm.client import RouteMissingError, ServerClient

_LOG = logging.getLogger("agl_vllm")


async def load_adapter(client: ServerClient, weights: Weights, *, name: str) -> None:
    """Serve the adapter as the model ``name``; raises :class:`PolicyError` where the server takes none."""
    async with _between_answers(client):
        try:
            await client.load_adapter(name, weights.uri)
        except RouteMissingError as error:
            raise PolicyError(
                f"the server at {client.base_url} takes no adapters ({error}); start it with --enable-lora and the "
                "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or let agl start it with lora_rank"
            ) from error


async def reload_weights(client: ServerClient, weights: Weights) -> None:
    """Read full weights into the server; raises :class:`PolicyError` where it takes none."""
    async with _between_answers(client):
        try:
            await client.reload_weights(weights.uri)
        except RouteMissingError as error:
            raise PolicyError(
                f"the server at {client.base_url} takes no new weights ({error}); start it with the environment "
                "variable VLLM_SERVER_DEV_MODE=1, or let agl start it"
            ) from error


@asynccontextmanager
async def _between_answers(client: ServerClient) -> AsyncGenerator[None]:
    """Hold the server's requests within the block, then forget what the old weights computed of prompts."""
    try:
        await client.pause()
    except RouteMissingError:
        _LOG.warning(
            "the server at %s runs without VLLM_SERVER_DEV_MODE=1: answers in flight may mix two versions, and prompts "
            "that it keeps are forgotten only where it does so itself",
            client.base_url,
        )
        yield
        return
    try:
        yield
        await client.reset_prefix_cache()
    finally:
        await client.resume()


def rank_of(weights: Weights) -> int:
    """The rank that a peft adapter says it has; raises :class:`PolicyError` where it says none."""
    path = Path(weights.uri) / "adapter_config.json"
    try:
        return int(json.loads(path.read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"{path} gives no rank of an adapter ({error}); export the adapter again with peft"
        ) from error


async def run_together(work: Iterable[Awaitable[object]]) -> None:
    """Do all at once; the first failure ends the others before it is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
