"""A cheap load generator over raw asyncio streams, in a process of its own; prints its measurements as JSON.

``python -m benchmarks._load URL TOKENS_FILE CALLS CONNECTIONS RATE STREAM SEED``: with a rate of 0 every
connection sends as fast as it is answered; otherwise calls start at fixed times, whoever has not been answered yet.
"""

import asyncio
import random
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

_LETTERS = "abcdefghijklmnopqrstuvwxyz     "
PROMPT_TEXT = 3900
"""Characters of a prompt of about a thousand tokens."""


def make_body(seed: int, *, is_streamed: bool) -> bytes:
    """A chat request with text of its own, about a thousand tokens."""
    draw = random.Random(seed)
    text = "".join(draw.choices(_LETTERS, k=PROMPT_TEXT))
    messages = [{"role": "system", "content": "You are a calculator."}, {"role": "user", "content": text}]
    return msgspec.json.encode({"model": "canned", "stream": is_streamed, "temperature": 1.0, "messages": messages})


def make_request(url: str, token: str, body: bytes) -> bytes:
    """The whole HTTP request."""
    parts = urlsplit(url)
    head = (
        f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {token}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One keep-alive connection that makes one call at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 22)

    async def call(self, request: bytes) -> float:
        """Send and read to the end; returns the latency in seconds."""
        started = time.perf_counter()
        await self.answer(request)
        return time.perf_counter() - started

    async def answer(self, request: bytes) -> bytes:
        """Send and read to the end; returns the body, of a stream with the sizes of its pieces."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at >= 0:
            return await self._reader.readexactly(int(lower[at + 15 : lower.find(b"\r\n", at)]))
        return await self._reader.readuntil(b"\r\n0\r\n\r\n")

    def close(self) -> None:
        self._writer.close()


async def closed_loop(connections: list[Connection], requests: list[list[bytes]], calls: int) -> list[float]:
    """``calls`` calls, every connection as fast as it is answered."""
    left = iter(range(calls))
    latencies: list[float] = []

    async def work(connection: Connection, own: list[bytes]) -> None:
        for number in left:
            latencies.append(await connection.call(own[number % len(own)]))

    await asyncio.gather(*(work(c, own) for c, own in zip(connections, requests, strict=True)))
    return latencies


async def open_loop(connections: list[Connection], requests: list[list[bytes]], calls: int, rate: float) -> list[float]:
    """``calls`` calls that start at fixed times; a late start counts as latency."""
    free: asyncio.Queue[int] = asyncio.Queue()
    for index in range(len(connections)):
        free.put_nowait(index)
    latencies: list[float] = []
    begin = time.perf_counter() + 0.05

    async def one(number: int) -> None:
        due = begin + number / rate
        index = await free.get()
        await connections[index].call(requests[index][number % len(requests[index])])
        latencies.append(time.perf_counter() - due)
        free.put_nowait(index)

    tasks: list[asyncio.Task[None]] = []
    for number in range(calls):
        await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    return latencies


async def main(
    url: str, tokens_file: str, calls: int, connections: int, rate: float, is_streamed: bool, seed: int
) -> None:
    tokens = Path(tokens_file).read_text(encoding="utf-8").split()
    opened = [Connection(url) for _ in range(connections)]
    for connection in opened:
        await connection.open()
    bodies = [make_body(seed + number, is_streamed=is_streamed) for number in range(64)]
    requests = [[make_request(url, tokens[i % len(tokens)], body) for body in bodies] for i in range(connections)]
    await closed_loop(opened, requests, connections)
    started = time.perf_counter()
    if rate:
        latencies = await open_loop(opened, requests, calls, rate)
    else:
        latencies = await closed_loop(opened, requests, calls)
    wall = time.perf_counter() - started
    for connection in opened:
        connection.close()
    ordered = sorted(latencies)
    result = {
        "calls": len(ordered),
        "wall_s": wall,
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
    }
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    url_, tokens_, calls_, connections_, rate_, streamed_, seed_ = sys.argv[1:]
    asyncio.run(main(url_, tokens_, int(calls_), int(connections_), float(rate_), streamed_ == "1", int(seed_)))
