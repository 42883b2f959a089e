"""Counts the agents that run, and fits their number to what the model servers can take.

Too few rollouts leave a server idle. Too many crowd its KV cache, which then drops sequences and computes them again,
and they become old while they wait. The servers' own numbers tell which is the case: ``/metrics`` of vLLM, SGLang and
the policy ``torch`` has the requests that run and wait, and that of the first two the share of the KV cache in use.

The limit grows while it binds and hardly a request waits: it doubles until a server was full once, and grows by one
sixteenth from then on. A KV cache that is nearly full holds it. It shrinks to nine tenths while more than a tenth of
the rollouts wait, but only once the rollouts at once have come down to it: a step that has not taken effect yet says
nothing. A short queue stays, because it keeps a server busy while agents use their tools.
``[runner] concurrency`` bounds the limit, and thereby how many rollouts are under way when new weights are published.
"""

import asyncio
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import httpx

from agl.contracts import Upstream
from agl.schemas import Record

_LOG = logging.getLogger("agl_run.runners")

POLL_S = 1.0
"""Seconds between two readings of the servers."""

ANSWER_S = 5.0
"""Seconds in which a server has to answer."""

START = 8
"""Rollouts at once in the beginning."""

QUEUE = 0.1
"""Share of the rollouts whose requests may wait."""

FULL = 0.9
"""Share of a KV cache from which on it counts as full."""

_SAMPLE = re.compile(r"^\w+:(\w+)(?:\{[^}]*\})? ([-+\d.eE]+)$", re.MULTILINE)
_WAITING = ("num_requests_waiting", "num_queue_reqs")
_CACHE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage")


class Slots:
    """Counts the running agents, and sums their running time.

    Args:
        count: The number of agents that may run at once; 0 if other machines run all agents.
        clock: Returns monotonic seconds.

    Attributes:
        most: The number at the start, which the count never exceeds.
        taken: The number of agents that are running.
    """

    def __init__(self, count: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = self.most = count
        self.taken = 0
        self._clock = clock
        self._since = clock()
        self._total_s = 0.0

    @property
    def free(self) -> int:
        """The number of further agents that may start."""
        return self.count - self.taken

    def now(self) -> tuple[float, float]:
        """Return the current time, and the total seconds for which all agents together have run until now."""
        now = self._clock()
        # An integral over time, brought up to date at each change.
        self._total_s += self.taken * (now - self._since)
        self._since = now
        return now, self._total_s

    def take(self) -> None:
        """Count an agent that starts."""
        self.now()
        self.taken += 1

    def leave(self) -> None:
        """Count an agent that has ended."""
        self.now()
        self.taken -= 1


class Load(Record, frozen=True, kw_only=True):
    """The load of the model servers: all requests that wait, and the fullest KV cache, from 0 to 1."""

    waiting: float = 0.0
    cache: float = 0.0


class Limit:
    """The number of rollouts at once, at most ``ceiling``."""

    def __init__(self, ceiling: int) -> None:
        self.ceiling, self.count = ceiling, min(START, ceiling)
        self._was_full = False

    def update(self, load: Load, *, taken: int) -> int:
        """Return the new limit, from the servers' load and the number of rollouts that run."""
        if load.waiting > QUEUE * taken:
            self._was_full = True
            if taken <= self.count:
                self.count = max(1, int(self.count * 0.9))
        elif taken >= self.count and load.cache <= FULL:
            step = max(1, self.count // 16) if self._was_full else self.count
            self.count = min(self.ceiling, self.count + step)
        return self.count


def load_of(texts: Sequence[str]) -> Load:
    """Return the load that the servers' ``/metrics`` show, in the text format of Prometheus."""
    found = defaultdict[str, list[float]](list)
    for name, value in (sample for text in texts for sample in _SAMPLE.findall(text)):
        found[name].append(float(value))
    waiting = [value for name in _WAITING for value in found[name]]
    return Load(waiting=sum(waiting), cache=max([value for name in _CACHE for value in found[name]], default=0.0))


async def adapt(slots: Slots, upstreams: Sequence[Upstream], *, changed: Callable[[], None]) -> None:
    """Fit ``slots.count`` to the servers' load until cancelled; ``changed`` is called after each reading.

    A server without ``/metrics`` is not asked again; while one does not answer, the number stays.
    """
    limit = Limit(slots.count)
    slots.count = limit.count
    servers: list[tuple[str, str]] = []
    for upstream in upstreams:
        servers += [(url, upstream.api_key_env) for url in (upstream.base_url, *upstream.replicas)]
    async with httpx.AsyncClient(timeout=ANSWER_S) as client:
        while servers:
            texts = await asyncio.gather(*(_metrics(client, url, key_env=key) for url, key in servers))
            servers = [server for server, text in zip(servers, texts, strict=True) if text is not None]
            if "" not in texts:
                load = load_of([text for text in texts if text is not None])
                slots.count = limit.update(load, taken=slots.taken)
            changed()
            await asyncio.sleep(POLL_S)
    slots.count = limit.ceiling
    changed()
    _LOG.warning("is_adaptive has no effect, because no model server has /metrics: %d rollouts at once", slots.count)


async def _metrics(client: httpx.AsyncClient, base_url: str, *, key_env: str) -> str | None:
    """Return a server's metrics; ``""`` if it does not answer, and ``None`` if it names no waiting requests."""
    headers = {"Authorization": f"Bearer {os.environ.get(key_env, '')}"} if key_env else {}
    try:
        answer = await client.get(base_url.rstrip("/").removesuffix("/v1") + "/metrics", headers=headers)
    except httpx.HTTPError:
        return ""
    if answer.is_server_error:  # it starts, or sleeps
        return ""
    return answer.text if answer.is_success and any(name in answer.text for name in _WAITING) else None
