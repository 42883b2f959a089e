"""The gateway answers no mutated request, on any route, with a 500, and stays available for others."""

import asyncio
import contextlib
import ctypes
import gc
import gzip
import itertools
import json
import random
import re
import resource
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agl.schemas import Attempt, Rollout, new_rollout_id
from agl_gateway.service import GatewayService
from agl_gateway.store_api.contract import METHODS
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import stopwatch

ADMIN = "an-admin-token-of-the-tests"
AT_ONCE = 8
MAX_WAIT_S = 0.5
PATIENCE_S = 10.0

VALUES = [None, -1, 0, 2**63, -(2**63) - 1, 1e308, "", "\x00", "\ud800", "x" * 5000, [], {}, [[]], {"a": []}, True]
BYTES = [b"\xff", b"\x00", b"\r\n", b"[" * 1500, b'"', b"{", b"}", b"9" * 40, b"\\ud800", b"%00", b"%ff", b"../", b";"]
HEADERS = [
    b"Content-Encoding: gzip",
    b"Content-Encoding: deflate, gzip",
    b"Content-Type: application/msgpack",
    b"Content-Type: \xff",
    b"x-agl-conversation-id: \xff",
    b"x-agl-request-id: \xfe\xff",
    b"x-agl-who: \xff",
    b"traceparent: 00-\xff",
    b"x-stainless-retry-count: -9999999999999999999999",
    b"User-Agent: \xff",
    b"Expect: 100-continue",
    b"Host: [",
    b"Transfer-Encoding: chunked",
    b"Upgrade: websocket",
]


@dataclass
class Sample:
    """A valid request."""

    line: bytes
    body: object = None


def samples(rollout_id: str, attempt_id: str) -> list[Sample]:
    """Return a valid request for every route of a gateway."""
    message = [{"role": "user", "content": "hi"}]
    call = {"model": "main_llm", "messages": message, "n": 1, "seed": 1, "metadata": {}, "tools": [], "max_tokens": 3}
    span = {"rollout_id": rollout_id, "attempt_id": attempt_id, "span_id": "a" * 16, "name": "s", "attributes": {}}
    params: dict[str, object] = {
        "append_spans": {"spans": [span]},
        "rollouts": {"query": {"ids": [rollout_id], "limit": 5, "status": ["running"]}},
        "recordings": {"query": {"limit": 5}},
        "claim": {"worker": "w", "limit": 1},
        "spans": {"rollout_id": rollout_id, "attempt_id": attempt_id, "after": 0, "limit": 5},
    }
    return [
        *(Sample(f"POST /v1/{name}".encode(), call) for name in ("chat/completions", "messages")),
        Sample(b"POST /v1/responses", {"model": "main_llm", "input": "hi", "include": []}),
        *(Sample(f"POST /v1/{name}".encode(), {**call, "prompt": "x"}) for name in ("completions", "embeddings")),
        Sample(f"POST /rollout/{rollout_id}/attempt/{attempt_id}/key/K/v1/chat/completions".encode(), call),
        *(Sample(f"POST /store/{name}".encode(), params.get(name, {"rollout_id": "r"})) for name in METHODS),
        Sample(b"POST /settle", {"attempt_id": attempt_id}),
        Sample(b"POST /v1/traces", "an OTLP message"),
        Sample(b"POST /conversations/end", {}),
        Sample(b"POST /conversations/rate", {"value": 1.0, "feedback": "good"}),
        *(Sample(b"GET " + path) for path in (b"/identity", b"/metrics", b"/openapi.json", b"/v1/models", b"/split")),
    ]


class Mutator:
    """Makes invalid requests from samples, with a random generator of a fixed seed."""

    def __init__(self, seed: int, token: str) -> None:
        self._random = random.Random(seed)
        self._token = token

    def request(self, sample: Sample) -> bytes:
        """Return the bytes of a request with one or more errors."""
        body = b"" if sample.body is None else json.dumps(self._mutated(sample.body)).encode()
        line = sample.line
        if self._random.random() < 0.3:
            body = self._inserted(body)
        if self._random.random() < 0.1:
            body = gzip.compress(body)[: self._random.randrange(1, 60)]
        if self._random.random() < 0.1:
            line = self._inserted(line).replace(b"\r\n", b"")
        headers = [b"Host: 127.0.0.1", b"Content-Type: application/json", b"Authorization: Bearer " + self._key()]
        headers += self._random.sample(HEADERS, self._random.choice((0, 0, 1, 2)))
        length = len(body) + self._random.choice((0,) * 20 + (-1, 1))
        headers += [f"Content-Length: {max(length, 0)}".encode(), b"Connection: close"]
        return line + b" HTTP/1.1\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + body

    def _key(self) -> bytes:
        return self._random.choice((self._token.encode(), self._token.encode(), ADMIN.encode(), b"\xff", b""))

    def _mutated(self, value: object) -> object:
        if self._random.random() < 0.15:
            return self._random.choice(VALUES)
        if isinstance(value, dict):
            return {key: self._mutated(item) for key, item in value.items() if self._random.random() < 0.95}
        return [self._mutated(item) for item in value] if isinstance(value, list) else value

    def _inserted(self, data: bytes) -> bytes:
        at = self._random.randrange(len(data) + 1)
        return data[:at] + self._random.choice(BYTES) + data[at + self._random.randrange(3) :]


async def exchange(service: GatewayService, request: bytes) -> tuple[bytes, float]:
    """Send a request on a new connection; returns the start of the response, and the seconds that it took."""
    watch = stopwatch()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))
    answer = b""
    try:
        writer.write(request)
        with contextlib.suppress(TimeoutError, ConnectionError):
            answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()
    return answer, watch()


@contextlib.asynccontextmanager
async def backend() -> AsyncIterator[str]:
    """Run a model API that answers every request with an empty object, so that any 500 is the gateway's own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length[1]) if length else 0)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@contextlib.asynccontextmanager
async def probing(service: GatewayService) -> AsyncIterator[list[float]]:
    """Request ``/healthz`` every 100 ms while the block runs; the list collects the process seconds of each answer."""
    waits: list[float] = []

    async def probe() -> None:
        while True:
            answer, wait_s = await exchange(service, b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            waits.append(wait_s)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(probe())
    try:
        yield waits
    finally:
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def attempt_token(service: GatewayService) -> tuple[Attempt, str]:
    """Return a running attempt and its token."""
    await service.store.enqueue([Rollout(rollout_id=new_rollout_id(), task={})])
    attempt = (await service.store.claim(worker="w", lease_s=3600))[0].attempt
    token = service.tokens.issue(attempt.rollout_id, attempt.attempt_id, expires_at=time.time() + 3600)
    return attempt, token


async def fuzz(service: GatewayService, requests: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """Send the requests, several at once; returns those answered with 500, each with its response."""
    left, failed = iter(requests), list[tuple[bytes, bytes]]()

    async def send() -> None:
        for request in left:
            answer, _ = await exchange(service, request)
            if b" 500 " in answer[:20]:
                failed.append((request[:500], answer[-500:]))

    await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    return failed


def memory() -> int:
    """Return the bytes of memory in use, after a garbage collection and without what the allocator keeps in reserve."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a libc without malloc_trim
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


SOAK = (pytest.mark.soak, pytest.mark.timeout(3600))


@pytest.mark.long
@pytest.mark.parametrize("count", [400, pytest.param(50_000, marks=SOAK)])
async def test_no_mutated_request_is_answered_with_500_or_holds_up_others(serving, tmp_path: Path, count: int):
    store = SQLiteStore(f"sqlite:///{tmp_path}/fuzzed.db")
    async with backend() as url, serving(backend=url, store=store, headers_s=1.0, body_s=1.0) as service:
        attempt, token = await attempt_token(service)
        mutator, known = Mutator(seed=count, token=token), samples(attempt.rollout_id, attempt.attempt_id)
        requests = (mutator.request(known[number % len(known)]) for number in range(count))
        async with probing(service) as waits:
            failed = await fuzz(service, itertools.islice(requests, count // 5))
            before = memory()
            failed += await fuzz(service, requests)
        after = memory()
        report = f"{count} mutated requests: {len(failed)} answers of 500, {len(waits)} probes, the longest waited "
        print(f"{report}{max(waits):.3f} s, memory {before >> 20} MiB after a fifth and {after >> 20} MiB in the end")
        assert [] == failed
        assert max(waits) < MAX_WAIT_S
        assert after < 1.1 * before
