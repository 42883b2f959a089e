"""Requests that never end are cut off, and no other request waits for them."""

import asyncio
import contextlib
import json
import time

import pytest

from agl_gateway.service import GatewayService
from agl_testing.waiting import eventually

ADMIN = "an-admin-token-of-the-tests"
SLOW = 200


async def connect(service: GatewayService) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))


async def healthy(service: GatewayService) -> bool:
    """Return true if ``/healthz`` answers on a new connection."""
    reader, writer = await connect(service)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Some"])
async def test_connections_without_whole_headers_are_closed(serving, start: bytes):
    async with serving(headers_s=0.5) as service:
        opened = [await connect(service) for _ in range(SLOW)]
        for _, writer in opened:
            writer.write(start)
        assert await healthy(service)
        ends = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in opened)), 60)
        assert [b""] * SLOW == ends
        for _, writer in opened:
            writer.close()


async def test_headers_that_arrive_byte_by_byte_are_cut_off(serving):
    async with serving(headers_s=0.5) as service:
        reader, writer = await connect(service)
        writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        ended = asyncio.create_task(reader.read())
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not ended.done() and time.monotonic() - started < 60:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.05)
        assert time.monotonic() - started < 40
        writer.close()


async def test_idle_connection_serves_further_requests(serving):
    async with serving(headers_s=0.8) as service:
        reader, writer = await connect(service)
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in await reader.readline()
            await reader.readuntil(b'{"status": "ok"}')
            with pytest.raises(TimeoutError):  # longer than headers may take: the connection stays
                await asyncio.wait_for(reader.read(1), 1.0)
        writer.close()


async def test_second_request_has_a_deadline_of_its_own(serving):
    async with serving(headers_s=0.3) as service:
        reader, writer = await connect(service)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b'{"status": "ok"}')
        writer.write(b"GET /healthz HTTP/1.1\r\nHo")
        assert b"" == await asyncio.wait_for(reader.read(), 60)
        writer.close()


@pytest.mark.parametrize("framing", [b"Content-Length: 5000", b"Transfer-Encoding: chunked"])
async def test_body_that_does_not_arrive_is_answered_with_408(serving, framing: bytes):
    async with serving(body_s=0.4) as service:
        reader, writer = await connect(service)
        head = b"POST /store/rollouts HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + framing
        writer.write(head + b"\r\nAuthorization: Bearer " + ADMIN.encode() + b"\r\n\r\n5\r\nhello\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()
        assert b"too slowly" in answer
        writer.close()
        assert await healthy(service)


async def test_large_body_that_keeps_arriving_is_read(serving):
    async with serving(body_s=1.5) as service:
        reader, writer = await connect(service)
        body = json.dumps({"query": {"ids": ["x" * 200_000]}}).encode()
        head = (
            f"POST /store/rollouts HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\nAuthorization: Bearer {ADMIN}\r\n\r\n".encode())
        for start in range(0, len(body), 20_000):  # 2.2 s, at some 90 KB/s
            writer.write(body[start : start + 20_000])
            await asyncio.sleep(0.2)
        assert b"404" in await asyncio.wait_for(reader.readline(), 60)
        writer.close()


MIB = 1024 * 1024


async def begin(service: GatewayService, headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the headers of a store request, without its body."""
    reader, writer = await connect(service)
    head = f"POST /store/rollouts HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{headers}"
    writer.write(f"{head}\r\nAuthorization: Bearer {ADMIN}\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


async def ask(service: GatewayService, *, size: int) -> bytes:
    """Send a complete request of ``size`` bytes; returns the response."""
    body = b'{"query":{}}'.ljust(size)
    reader, writer = await begin(service, f"Connection: close\r\nContent-Length: {size}")
    writer.write(body)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "framing",
    [f"Content-Length: {2 * MIB}", "Transfer-Encoding: chunked", "Content-Encoding: gzip\r\nContent-Length: 9999"],
)
async def test_large_bodies_beyond_the_budget_are_refused_and_small_ones_are_not(serving, framing: str):
    async with serving(max_bodies=3 * MIB, max_body=2 * MIB, bodies_wait_s=0.3) as service:
        _, holder = await begin(service, framing)
        await eventually(lambda: service.bodies_held > 0)
        refused = await ask(service, size=2 * MIB)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5" in refused.lower()
        assert f"of {3 * MIB} bytes".encode() in refused
        assert (await ask(service, size=MIB // 2)).startswith(b"HTTP/1.1 200")
        holder.close()
        await eventually(lambda: service.bodies_held == 0)
        assert (await ask(service, size=2 * MIB)).startswith(b"HTTP/1.1 200")
        assert 0 == service.bodies_held


async def test_large_body_waits_for_room(serving):
    async with serving(max_bodies=3 * MIB, bodies_wait_s=30.0) as service:
        _, holder = await begin(service, f"Content-Length: {2 * MIB}")
        await eventually(lambda: service.bodies_held > 0)
        waiting = [asyncio.create_task(ask(service, size=2 * MIB)) for _ in range(5)]
        assert await healthy(service)
        assert not any(task.done() for task in waiting)
        holder.close()
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in await asyncio.gather(*waiting))


async def test_body_that_is_announced_too_long_is_refused_unread(serving):
    async with serving() as service:
        reader, writer = await begin(service, f"Content-Length: {100 * MIB}")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 413")
        writer.close()
