"""Updates of one running server's weights, between answers and never within one."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agl.errors import PolicyError
from agl.schemas import Weights
from agl_vllm.client import RouteMissingError, ServerClient

_LOG = logging.getLogger("agl_vllm")


async def load_adapter(client: ServerClient, weights: Weights, *, name: str) -> None:
    """Load the adapter as the model ``name``; raises :class:`PolicyError` where the server takes no adapters."""
    async with _between_answers(client):
        try:
            await client.load_adapter(name, weights.uri)
        except RouteMissingError as error:
            raise PolicyError(
                f"the server at {client.base_url} takes no adapters ({error}); start it with --enable-lora and the "
                "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or let agl start it with lora_rank"
            ) from error


async def reload_weights(client: ServerClient, weights: Weights) -> None:
    """Load full weights into the server; raises :class:`PolicyError` where it takes no new weights."""
    async with _between_answers(client):
        try:
            await client.reload_weights(weights.uri)
        except RouteMissingError as error:
            raise PolicyError(
                f"the server at {client.base_url} takes no new weights ({error}); start it with the environment "
                "variable VLLM_SERVER_DEV_MODE=1, or let agl start it"
            ) from error


async def replace_weights(client: ServerClient, weights: Weights) -> None:
    """Free the server's weights, then load others in their place; raises :class:`PolicyError` where it cannot.

    After a failure the server has no weights, and must be started again.
    """
    async with _between_answers(client):
        try:
            await client.sleep()
            await client.wake_up("weights")
            await client.reload_weights(weights.uri)
            await client.wake_up("kv_cache")
        except RouteMissingError as error:
            raise PolicyError(
                f"the server at {client.base_url} cannot sleep ({error}); start it with --enable-sleep-mode and the "
                'environment variable VLLM_SERVER_DEV_MODE=1, or write sync = "reload"'
            ) from error


@asynccontextmanager
async def _between_answers(client: ServerClient) -> AsyncGenerator[None]:
    """Hold the server's requests within the block, then drop the prefixes that the old weights computed."""
    # An answer that begins with the old weights and ends with the new ones has log-probabilities of neither.
    is_held = True
    try:
        try:
            await client.pause()
        except RouteMissingError:
            is_held = False
            _LOG.warning(
                "the server at %s runs without VLLM_SERVER_DEV_MODE=1: answers in flight may mix two versions of the "
                "weights, and its prefix cache is cleared only where the server does so itself",
                client.base_url,
            )
        yield
        if is_held:
            await client.reset_prefix_cache()
    except BaseException:  # a pause that failed may hold them all the same, and every call of the agents would hang
        if is_held:
            with suppress(PolicyError):  # the first failure says more
                await client.resume()
        raise
    if is_held:
        await client.resume()


def rank_of(weights: Weights) -> int:
    """Return the rank in a peft adapter's configuration; raises :class:`PolicyError` where it has none."""
    path = Path(weights.uri) / "adapter_config.json"
    try:
        return int(json.loads(path.read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"{path} gives no rank of an adapter ({error}); export the adapter again with peft"
        ) from error


async def run_together(work: Iterable[Awaitable[object]]) -> None:
    """Run everything at once; the first failure cancels the others and is then raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
