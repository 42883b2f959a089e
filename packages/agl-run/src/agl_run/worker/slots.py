"""Counts the agents that run, and fits their number to what the model servers can take.

Too few rollouts leave a server idle. Too many crowd its KV cache, which then drops sequences and computes them again,
and they become old while they wait. The servers' own numbers tell which is the case: ``/metrics`` of vLLM, SGLang and
the policy ``torch`` has the requests that run and wait, and that of the first two the share of the KV cache in use.

The limit grows while it binds and hardly a request waits: it doubles until a server was full once, and grows by one
sixteenth from then on. A KV cache that is nearly full holds it. It shrinks to nine tenths while the requests that wait
are more than a tenth of those that run, but only once the rollouts at once have come down to it: a step that has not
taken effect yet says nothing. A short queue stays, because it keeps a server busy while agents use their tools. Both
numbers are the servers' own, so that requests of other workers count on both sides.
``[runner] concurrency`` bounds the limit, and thereby how many rollouts are under way when new weights are published.
"""

import asyncio
import logging
import os
import re
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from agl.contracts import Upstream
from agl.schemas import Record
from agl.urls import without_credentials

_LOG = logging.getLogger("agl_run.runners")

POLL_S = 1.0
"""Seconds between two readings of the servers."""

ANSWER_S = 5.0
"""Seconds in which a server has to answer."""

START = 8
"""Rollouts at once in the beginning."""

QUEUE = 0.1
"""Requests that may wait, as a share of the requests that run."""

FULL = 0.9
"""Share of a KV cache from which on it counts as full."""

_WAITING = ("num_requests_waiting", "num_queue_reqs")
_RUNNING = ("num_requests_running", "num_running_reqs")
_CACHE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage")
# A collector between server and reader may have replaced the colon by an underscore.
_SAMPLE = re.compile(
    rf"^\w+[:_]({'|'.join((*_WAITING, *_RUNNING, *_CACHE))})(?:\{{[^}}]*\}})? ([-+\d.eE]+)$", re.MULTILINE
)


class Load(Record, frozen=True, kw_only=True):
    """The load of the model servers: all requests that wait and run, and the fullest KV cache, from 0 to 1."""

    waiting: float = 0.0
    running: float = 0.0
    cache: float = 0.0


class Slots:
    """Counts the running agents, and sums their time and that of the slots.

    Args:
        count: The number of agents that may run at once; 0 if other machines run all agents.
        is_adaptive: Whether the number begins at ``START`` and follows the servers' load; see :meth:`fit`.
        clock: Returns monotonic seconds.

    Attributes:
        most: The largest number of agents at once.
        count: The number of agents that may run at once now.
        taken: The number of agents that are running.
    """

    def __init__(self, count: int, *, is_adaptive: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.taken = count, 0
        self.count = min(START, count) if is_adaptive else count
        self._was_full = False
        self._clock = clock
        self._since = clock()
        self._offered_s = self._taken_s = 0.0

    @property
    def free(self) -> int:
        """The number of further agents that may start."""
        return self.count - self.taken

    def totals(self) -> tuple[float, float]:
        """Return the slot-seconds that were offered until now, and those in which agents ran."""
        now = self._clock()
        # Integrals over time, brought up to date at each change.
        self._offered_s += self.count * (now - self._since)
        self._taken_s += self.taken * (now - self._since)
        self._since = now
        return self._offered_s, self._taken_s

    def take(self) -> None:
        """Count an agent that starts."""
        self.totals()
        self.taken += 1

    def leave(self) -> None:
        """Count an agent that has ended."""
        self.totals()
        self.taken -= 1

    def resize(self, count: int) -> None:
        """Change the number of agents at once, within 1 and ``most``."""
        self.totals()
        self.count = max(1, min(self.most, count))

    def fit(self, load: Load) -> None:
        """Fit the number to the servers' load."""
        if load.waiting > QUEUE * load.running:
            self._was_full = True
            if self.taken <= self.count:
                self.resize(int(self.count * 0.9))
        elif self.taken >= self.count and load.cache <= FULL:
            self.resize(self.count + (max(1, self.count // 16) if self._was_full else self.count))


def load_of(texts: Iterable[str]) -> Load:
    """Return the load that the servers' ``/metrics`` show, in the text format of Prometheus."""
    found = defaultdict[str, list[float]](list)
    for name, value in (sample for text in texts for sample in _SAMPLE.findall(text)):
        found[name].append(float(value))
    waiting, running, cache = (
        [value for name in names for value in found[name]] for names in (_WAITING, _RUNNING, _CACHE)
    )
    return Load(waiting=sum(waiting), running=sum(running), cache=max(cache, default=0.0))


async def adapt(slots: Slots, upstreams: Sequence[Upstream], *, changed: Callable[[], None]) -> None:
    """Fit ``slots`` to the servers' load until cancelled; ``changed`` is called after each reading.

    A server without ``/metrics`` is not asked again. One that does not answer has no say until it does.
    """
    servers: dict[str, str] = _servers(upstreams)
    silent = set[str]()
    while servers:
        texts = await asyncio.gather(*(asyncio.to_thread(_metrics, url, key_env=key) for url, key in servers.items()))
        found = {url: text for url, text in zip(servers, texts, strict=True) if text is not None}
        servers = {url: servers[url] for url in found}
        for url in [url for url, text in found.items() if not text and url not in silent]:
            silent.add(url)
            shown = without_credentials(url)
            _LOG.warning("%s does not answer: is_adaptive does without its load until it does", shown)
        if any(found.values()):
            slots.fit(load_of(found.values()))
        changed()
        await asyncio.sleep(POLL_S)
    slots.resize(slots.most)
    changed()
    _LOG.warning("is_adaptive has no effect, because no model server has /metrics: %d rollouts at once", slots.count)


def _servers(upstreams: Sequence[Upstream]) -> dict[str, str]:
    """Return each server's address of metrics once, with the variable of its key."""
    return {
        url.rstrip("/").removesuffix("/v1") + "/metrics": upstream.api_key_env
        for upstream in upstreams
        for url in (upstream.base_url, *upstream.replicas)
    }


def _metrics(url: str, *, key_env: str) -> str | None:
    """Return a server's metrics; ``""`` if it does not answer, and ``None`` if it names no waiting requests."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    given = (
        f"Bearer {os.environ.get(key_env, '')}" if key_env else f"Basic {b64encode(unquote(user).encode()).decode()}"
    )
    headers = {"Authorization": given} if key_env or at else {}
    try:
        with urlopen(Request(without_credentials(url), headers=headers), timeout=ANSWER_S) as answer:
            text = answer.read().decode(errors="replace")
    except HTTPError as error:
        return "" if error.code == 429 or error.code >= 500 else None  # it starts, sleeps, or is busy
    except (OSError, HTTPException):
        return ""
    return text if any(name in _WAITING for name, _ in _SAMPLE.findall(text)) else None
