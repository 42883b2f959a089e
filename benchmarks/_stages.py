"""Samples where a process spends its CPU, by the part of the gateway that the main thread is in."""

import signal
from collections import Counter
from types import FrameType

_EVERY_S = 0.001

_STAGES = {
    "asyncio/selector_events": "sockets: sending and receiving",
    "selectors": "waiting for sockets, and other threads",
    "agl_gateway/wire/http": "HTTP",
    "aiohttp/web": "HTTP: server",
    "aiohttp/client": "HTTP: client",
    "aiohttp/connector": "HTTP: client",
    "aiohttp/": "HTTP: both sides",
    "agl_store_sqlite": "store",
    "agl_gateway/record": "recording: queue and batches",
    "agl/dialects/_calls": "recording: reading the answer, making the span",
    "agl/dialects/_chat": "recording: reading the answer, making the span",
    "agl/tracing": "recording: reading the answer, making the span",
    "agl/dialects": "reading and changing the request",
    "agl_gateway/relay/sender": "relay: sending",
    "agl_gateway/relay": "relay: owner, route, sampling",
    "agl_gateway": "identity, quotas, ids",
    "asyncio/": "event loop, tasks",
}


class Stages:
    """Counts samples of this process's main thread by stage, one for each millisecond of CPU."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)

    def taken(self) -> dict[str, int]:
        """Return the samples by stage, and start from zero."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def _sample(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None:
            path = frame.f_code.co_filename
            if (stage := next((name for part, name in _STAGES.items() if part in path), None)) is not None:
                self._counts[stage] += 1
                return
            frame = frame.f_back
        self._counts["other"] += 1
