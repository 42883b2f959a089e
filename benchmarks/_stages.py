"""Samples where a gateway spends its CPU, by the part of it that the main thread is in.

``python -m benchmarks._stages FILE serve ...`` runs ``agl serve ...`` and writes the samples of each stage, as JSON, to
FILE at its end. The kernel's clock decides how long a sample is, so only the shares count.
"""

import signal
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType

import msgspec

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


def main(path: Path) -> None:
    """Run ``agl`` with the remaining arguments, then write the samples."""
    counts: Counter[str] = Counter()
    signal.signal(signal.SIGPROF, lambda _number, frame: counts.update((_stage(frame),)))
    signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)
    (agl,) = entry_points(group="console_scripts", name="agl")
    try:
        agl.load()()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        path.write_bytes(msgspec.json.encode(counts))


def _stage(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if (stage := next((name for part, name in _STAGES.items() if part in path), None)) is not None:
            return stage
        frame = frame.f_back
    return "start and end of the program"


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)))
