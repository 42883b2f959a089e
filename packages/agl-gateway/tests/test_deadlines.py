"""Requests that never end are ended, and nobody else waits for them."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest

from agl.contracts import Upstream
from agl.stores import MemoryStore
from agl.tracing import AttemptTokens
from agl_gateway.service import GatewayService, Settings

SECRET = b"a secret of the tests of deadlines"
ADMIN = "an-admin-token-of-the-tests"
SLOW = 200


@contextlib.asynccontextmanager
async def serving(server, **settings) -> AsyncIterator[GatewayService]:
    store = MemoryStore()
    service = GatewayService(
        store=store,
        upstreams=[Upstream(name="main_llm", base_url=server.base_url, model="scripted")],
        tokens=AttemptTokens(SECRET),
        settings=Settings(**settings),
        admin_key=ADMIN,
    )
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
        await store.close()


async def connect(service: GatewayService) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))


async def healthy(service: GatewayService) -> bool:
    """Ask for ``/healthz`` on a new connection."""
    reader, writer = await connect(service)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Some"])
async def test_connections_without_whole_headers_are_closed(server, start: bytes):
    async with serving(server, headers_s=0.5) as service:
        opened = [await connect(service) for _ in range(SLOW)]
        for _, writer in opened:
            writer.write(start)
        assert await healthy(service)
        ends = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in opened)), 10)
        assert [b""] * SLOW == ends
        for _, writer in opened:
            writer.close()


async def test_headers_that_arrive_byte_by_byte_are_cut_off(server):
    async with serving(server, headers_s=0.5) as service:
        reader, writer = await connect(service)
        writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        ended = asyncio.create_task(reader.read())
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not ended.done() and time.monotonic() - started < 10:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.05)
        assert time.monotonic() - started < 5
        writer.close()


async def test_idle_connection_serves_further_requests(server):
    async with serving(server, headers_s=0.2) as service:
        reader, writer = await connect(service)
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in await reader.readline()
            await reader.readuntil(b'{"status": "ok"}')
            with pytest.raises(TimeoutError):  # longer than headers may take: the connection stays
                await asyncio.wait_for(reader.read(1), 1.0)
        writer.close()


async def test_second_request_has_a_deadline_of_its_own(server):
    async with serving(server, headers_s=0.3) as service:
        reader, writer = await connect(service)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b'{"status": "ok"}')
        writer.write(b"GET /healthz HTTP/1.1\r\nHo")
        assert b"" == await asyncio.wait_for(reader.read(), 10)
        writer.close()


@pytest.mark.parametrize("framing", [b"Content-Length: 5000", b"Transfer-Encoding: chunked"])
async def test_body_that_does_not_arrive_is_answered_with_408(server, framing: bytes):
    async with serving(server, body_s=0.4) as service:
        reader, writer = await connect(service)
        head = b"POST /store/rollouts HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + framing
        writer.write(head + b"\r\nAuthorization: Bearer " + ADMIN.encode() + b"\r\n\r\n5\r\nhello\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()
        assert b"too slowly" in answer
        writer.close()
        assert await healthy(service)


async def test_large_body_that_keeps_arriving_is_read(server):
    async with serving(server, body_s=0.4) as service:
        reader, writer = await connect(service)
        body = json.dumps({"query": {"ids": ["x" * 100_000]}}).encode()
        head = (
            f"POST /store/rollouts HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\nAuthorization: Bearer {ADMIN}\r\n\r\n".encode())
        for start in range(0, len(body), 10_000):  # 1.1 s, at some 90 KB/s
            writer.write(body[start : start + 10_000])
            await asyncio.sleep(0.1)
        assert b"404" in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
