"""Updates the weights of a running server between answers, never within one, and checks each update.

A status of 200 is no proof: servers have answered 200 to reloads that left wrong logits. So the server scores the probe
that came with the weights, a text of N tokens with their log-probabilities, and the two are compared:

    difference = mean over the N - 1 tokens after the first of |log p_server - log p_weights|        in nats

The mean is used, not the maximum: rounding changes single unlikely tokens much, and wrong weights change nearly all.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agl.errors import PolicyError
from agl.schemas import PROBE_FILE, Weights, WeightsProbe, read_probe
from agl_vllm.client import RouteMissingError, ServerClient

_LOG = logging.getLogger("agl_vllm")


async def load_adapter(client: ServerClient, weights: Weights, *, name: str) -> None:
    """Load the adapter as the model ``name``; raises :class:`PolicyError` if the server takes no adapters."""
    remedy = (
        "start it with --enable-lora and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or let agl "
        "start it with lora_rank"
    )
    async with _between_answers(client, "takes no adapters", remedy):
        await client.load_adapter(name, weights.uri)


async def reload_weights(client: ServerClient, weights: Weights) -> None:
    """Load full weights into the server; raises :class:`PolicyError` if the server takes no new weights."""
    remedy = "start it with the environment variable VLLM_SERVER_DEV_MODE=1, or let agl start it"
    async with _between_answers(client, "takes no new weights", remedy):
        await client.reload_weights(weights.uri)


async def replace_weights(client: ServerClient, weights: Weights) -> None:
    """Free the server's weights, then load others in their place; raises :class:`PolicyError` if the server cannot.

    After a failure the server has no weights, and must be restarted.
    """
    remedy = (
        "start it with --enable-sleep-mode and the environment variable VLLM_SERVER_DEV_MODE=1, or "
        'write sync = "reload"'
    )
    async with _between_answers(client, "cannot sleep", remedy):
        await client.sleep()
        await client.wake_up("weights")
        await client.reload_weights(weights.uri)
        await client.wake_up("kv_cache")


@asynccontextmanager
async def _between_answers(client: ServerClient, lack: str, remedy: str) -> AsyncGenerator[None]:
    """Hold the server's requests inside the block, then drop the prefixes that were computed with the old weights.

    If the server lacks a route, the error says what the server cannot do (``lack``) and the ``remedy``.
    """
    # An answer that begins with the old weights and ends with the new ones has log-probabilities of neither version.
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
        try:
            yield
        except RouteMissingError as error:
            raise PolicyError(f"the server at {client.base_url} {lack} ({error}); {remedy}") from error
        if is_held:
            await client.reset_prefix_cache()
    except BaseException:  # a failed pause may hold requests too, so that calls of agents hang
        if is_held:
            with suppress(PolicyError):  # the first error says more
                await client.resume()
        raise
    if is_held:
        await client.resume()


def rank_of(weights: Weights) -> int:
    """Return the rank in a peft adapter's configuration; raises :class:`PolicyError` if no rank can be read."""
    path = Path(weights.uri) / "adapter_config.json"
    try:
        return int(json.loads(path.read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"{path} gives no rank of an adapter ({error}); export the adapter again with peft"
        ) from error


async def run_together(work: Iterable[Awaitable[object]]) -> None:
    """Await everything at once; the first failure cancels the rest and is then raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


FLOAT32_TOLERANCE = 1e-3
TOLERANCE = 0.05
"""Largest mean difference in nats that rounding causes between two engines in half precision.

For float32 the limit is ``FLOAT32_TOLERANCE``.
"""


def probe_of(weights: Weights, *, name: str) -> WeightsProbe:
    """Return the probe that came with the weights; raises :class:`PolicyError` if there is none."""
    probe = read_probe(Path(weights.uri))
    if probe is None:
        raise PolicyError(
            f"policy {name!r}: the weights in {weights.uri} have no {PROBE_FILE}, without which nobody can check that "
            "a server serves them; publish them with an algorithm that writes it (those of agl-algo-torch do), or set "
            "probe = false to serve them unchecked"
        )
    return probe


async def check_served(
    client: ServerClient, probe: WeightsProbe, *, name: str, model: str, version: str, tolerance: float
) -> float:
    """Compare the probe with the server's log-probabilities for ``model``; returns the mean difference in nats.

    Raises:
        PolicyError: The difference is above ``tolerance``; the message gives both values of the worst token, and both
            means.
    """
    served = await client.score(probe.token_ids, model=model)  # [N - 1]
    differences = [abs(a - b) for a, b in zip(served, probe.logprobs, strict=True)]  # [N - 1]
    difference = _mean(differences)  # nan where the server gave nan, which no tolerance lets pass
    if difference <= tolerance:
        return difference
    worst = max(range(len(differences)), key=differences.__getitem__)  # entry i is about token i + 1 of the probe
    raise PolicyError(
        f"policy {name!r}: the server at {client.base_url} said that it had taken the weights {version!r}, and does "
        f"not serve them: token {probe.token_ids[worst + 1]} at place {worst + 1} of the probe has log-probability "
        f"{served[worst]:.4f} there and {probe.logprobs[worst]:.4f} by the weights (means {_mean(served):.4f} and "
        f"{_mean(probe.logprobs):.4f}; mean difference {difference:.4f}, tolerance {tolerance:g}). "
        'Training on its answers would be wrong; use sync = "restart" with a server that agl starts, or raise '
        "probe_tolerance if the server computes in another precision"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
