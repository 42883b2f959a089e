"""Plain model calls over HTTP/1.1, and requests that only look like them: what is odd is refused and never misread."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from agl.contracts import Upstream
from agl_gateway.wire.http.calls import read_call
from agl_gateway.wire.http.upstream import Pool
from agl_testing.model_server import Reply

from .conftest import Stage

BODY = json.dumps({"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}).encode()
SIZE = b"%d" % len(BODY)
LINE = b"POST /v1/chat/completions HTTP/1.1"
HIDDEN = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"


class Client:
    """A connection to the gateway that sends bytes as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attempt_id: str, key: str) -> None:
        self.reader, self.writer, self.attempt_id = reader, writer, attempt_id
        self.key = b"authorization: Bearer " + key.encode()

    def send(self, *lines: bytes, body: bytes = BODY, line: bytes = LINE) -> None:
        """Send a request with these lines after ``line`` and the key."""
        self.writer.write(b"\r\n".join([line, self.key, *lines]) + b"\r\n\r\n" + body)

    async def status(self) -> int:
        """Read one answer; returns its status."""
        return int((await self.answer()).split()[1])

    async def answer(self) -> bytes:
        """Read one answer, which has a ``Content-Length``."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await self.reader.readexactly(size)

    async def rest(self) -> bytes:
        """Read until the gateway closes the connection."""
        async with asyncio.timeout(10):
            return await self.reader.read()


@asynccontextmanager
async def client(it: Stage) -> AsyncIterator[Client]:
    attempt_id, token = await it.open_attempt()
    place = urlsplit(it.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    try:
        yield Client(reader, writer, attempt_id, token)
    finally:
        writer.close()


ODD_LINES = [
    b"POST\t/v1/chat/completions HTTP/1.1",
    b" POST /v1/chat/completions HTTP/1.1",
    b"POST /v1/chat/completions HTTP/1.1 ",
    b"POST /v1/chat/completions HTTP/1.10",
    b"POST /v1/chat/completions HTTP/11",
    b"POST /v1/chat/completions HTTP/-1.1",
    b"POST /v1/chat/completions http/1.1",
    b"POST /v1/chat/completions XTTP/1.1",
    b"POST HTTP/1.1",
    b"PO ST /v1/chat/completions HTTP/1.1",
    b"P\x00ST /v1/chat/completions HTTP/1.1",
    b"POST /v1/chat/comp\x00letions HTTP/1.1",
    b"POST /v1/chat/comp letions HTTP/1.1",
    b"POST /v1/chat/completions HTTP/1.1\r",
    b"post /v1/chat/completions HTTP/1.1",
    b"PRI * HTTP/2.0",
]
TOLERATED_LINES = [  # by aiohttp
    b"POST  /v1/chat/completions HTTP/1.1",
    b"POST /v1/chat/completions  HTTP/1.1",
    b"POST /v1/chat/completions HTTP/1.0",
    b"POST /v1/chat/completions HTTP/2.0",
    b"POST /v1/chat/completions",
    b"POST /v1//chat/completions HTTP/1.1",
    b"POST /v1/../v1/chat/completions HTTP/1.1",
    b"POST /v1/chat%2fcompletions HTTP/1.1",
    b"POST http://a/v1/chat/completions HTTP/1.1",
    b"POST /store/v1/chat/completions HTTP/1.1",
    b"POST /store/append-spans HTTP/1.1",
    b"GET /store/append_spans HTTP/1.1",
    b"POST /v1/chat/completions?a=%0d%0a HTTP/1.1",
    b"GET /v1/chat/completions HTTP/1.1",
]
TOLERATED_FIELDS = [
    [b"content-length: " + SIZE, b"content-length: " + SIZE],
    [b"content-length: " + SIZE, b"x: a", b"x: b"],
    [b"content-length: " + SIZE, b"x: a\r\n b"],
    [b"content-length: " + SIZE, b"x: \xff"],
    [b"content-length: " + SIZE, b"expect: 100-continue"],
    [b"content-length: " + SIZE, b"upgrade: h2c"],
    [b"content-length: " + SIZE, b"connection: close"],
    [b"content-length: " + SIZE, b"connection: keep-alive, x"],
    [b"content-length: " + SIZE, b"content-encoding: gzip"],
    [b"content-length: 131073"],
    [b"transfer-encoding: chunked"],
    [],
]
ODD_FIELDS = [
    [b"content-length: " + SIZE, b"content-length: 3"],
    [b"content-length: 3", b"content-length: " + SIZE],
    [b"content-length: " + SIZE + b", 3"],
    [b"content-length: " + SIZE + b" 3"],
    [b"content-length: +" + SIZE],
    [b"content-length: -1"],
    [b"content-length: 0x10"],
    [b"content-length: 1_0"],
    [b"content-length: 1e1"],
    [b"content-length: "],
    [b"content-length: a"],
    [b"content-length: \xb2"],
    [b"content-length: 99999999999999999999999999"],
    [b"content-length : " + SIZE],
    [b"content-length\t: " + SIZE],
    [b" content-length: " + SIZE],
    [b"content-length: " + SIZE, b"transfer-encoding: chunked"],
    [b"transfer-encoding: chunked", b"content-length: " + SIZE],
    [b"transfer-encoding: chunked, identity"],
    [b"transfer-encoding: xchunked"],
    [b"transfer-encoding: chunked", b"transfer-encoding: identity"],
    [b"transfer-encoding : chunked"],
    [b"transfer-encoding: \x0bchunked"],
    [b"content-length: " + SIZE, b"x: a\x00b"],
    [b"content-length: " + SIZE, b"x\x00: a"],
    [b"content-length: " + SIZE, b"x y: a"],
    [b"content-length: " + SIZE, b"(x): a"],
    [b"content-length: " + SIZE, b"x\xff: a"],
    [b"content-length: " + SIZE, b": a"],
    [b"content-length: " + SIZE, b"no colon"],
    [b"content-length: " + SIZE, b"x: a\rb: c"],
    [b"content-length: " + SIZE, b"x: a\nb"],
    [b"content-length: " + SIZE, b"x: " + b"a" * 70_000],
    [b"content-length: " + SIZE, b"x" * 70_000 + b": a"],
]
ODD_BODIES = [
    b"x\r\n" + HIDDEN,
    b"-1\r\n" + HIDDEN,
    b"0x1\r\na\r\n0\r\n\r\n" + HIDDEN,
    b"1_0\r\n" + HIDDEN,
    b" 1\r\na\r\n0\r\n\r\n" + HIDDEN,
    b"+1\r\na\r\n0\r\n\r\n" + HIDDEN,
    b"\r\n" + HIDDEN,
    b"1\r\nab\r\n0\r\n\r\n" + HIDDEN,
    b"1\na\n0\n\n" + HIDDEN,
    b"ffffffffffffffffffffff\r\n" + HIDDEN,
]


@pytest.mark.parametrize("line", ODD_LINES)
async def test_odd_request_line_is_refused_and_ends_the_connection(stage, line: bytes):
    await refused(stage, line=line, lines=[b"host: a", b"content-length: " + SIZE], body=BODY)


@pytest.mark.parametrize("lines", ODD_FIELDS)
async def test_odd_header_is_refused_and_ends_the_connection(stage, lines: list[bytes]):
    await refused(stage, line=LINE, lines=[b"host: a", *lines], body=BODY)


@pytest.mark.parametrize("body", ODD_BODIES)
async def test_odd_chunk_is_refused_and_ends_the_connection(stage, body: bytes):
    await refused(stage, line=LINE, lines=[b"host: a", b"transfer-encoding: chunked"], body=body)


@pytest.mark.parametrize("line", [*ODD_LINES, *TOLERATED_LINES])
def test_odd_request_line_is_left_to_aiohttp(line: bytes):
    sent = line + b"\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
    assert (None, 0) == read_call(cast("Any", None), sent)
    assert (None, 0) != read_call(cast("Any", None), LINE + sent.removeprefix(line))


@pytest.mark.parametrize("lines", [*ODD_FIELDS, *TOLERATED_FIELDS])
def test_odd_header_is_left_to_aiohttp(lines: list[bytes]):
    sent = b"\r\n".join([LINE, b"host: a", *lines]) + b"\r\n\r\n" + BODY
    assert (None, 0) == read_call(cast("Any", None), sent)


@pytest.mark.parametrize("line", [LINE, b"POST /store/append_spans HTTP/1.1"])
def test_small_call_of_a_model_or_of_the_store_is_plain(line: bytes):
    sent = line + b"\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
    request, size = read_call(cast("Any", None), sent)
    assert request is not None
    assert (line.split()[1].decode(), b"{}", len(sent)) == (request.path, request.body, size)


async def refused(stage: Any, *, line: bytes, lines: list[bytes], body: bytes) -> None:
    async with stage() as it, client(it) as sender:
        sender.send(*lines, body=body, line=line)
        answer = await sender.rest()
    assert b" 400 " == answer[8:13]
    assert 1 == len(re.findall(rb"HTTP/1\.\d \d{3} ", answer))
    assert [] == it.server.calls


PLAIN = (b"host: a", b"content-length: " + SIZE)


async def test_pipelined_calls_are_answered_in_order(stage):
    async with stage() as it, client(it) as sender:
        for _ in range(3):
            sender.send(*PLAIN)
        sender.send(b"host: a", line=b"GET /v1/models HTTP/1.1", body=b"")
        sender.send(*PLAIN)
        assert [200] * 5 == [await sender.status() for _ in range(5)]
        assert 4 == len(it.server.calls)


@pytest.mark.parametrize("pause_s", [0.0, 0.7], ids=["at once", "later"])
async def test_call_that_arrives_in_pieces_is_answered(stage, pause_s: float):
    async with stage() as it, client(it) as sender:
        sent = b"\r\n".join([LINE, sender.key, *PLAIN]) + b"\r\n\r\n" + BODY
        for at in range(0, len(sent), 40):
            sender.writer.write(sent[at : at + 40])
            await asyncio.sleep(0.001)
            if at == 80:
                await asyncio.sleep(pause_s)
        assert 200 == await sender.status()


async def test_client_that_asks_to_continue_is_told_to(stage):
    async with stage() as it, client(it) as sender:
        sender.send(*PLAIN, b"expect: 100-continue", body=b"")
        assert b"HTTP/1.1 100 Continue\r\n\r\n" == await sender.reader.readuntil(b"\r\n\r\n")
        sender.writer.write(BODY)
        assert 200 == await sender.status()


async def test_upgrade_is_not_made(stage):
    async with stage() as it, client(it) as sender:
        sender.send(*PLAIN, b"connection: upgrade", b"upgrade: h2c")
        assert 200 == await sender.status()


async def test_call_of_a_large_body_is_answered(stage):
    body = json.dumps({"model": "main_llm", "messages": [{"role": "user", "content": "hi " * 100_000}]}).encode()
    async with stage() as it, client(it) as sender:
        sender.send(b"host: a", b"content-length: %d" % len(body), body=body)
        assert 200 == await sender.status()


@pytest.mark.parametrize("end", ["close", "half-close"])
async def test_client_that_leaves_ends_its_call(stage, end: str):
    async with stage() as it, client(it) as sender:
        it.server.enqueue(Reply(text="late", delay=20.0))
        sender.send(*PLAIN)
        await asyncio.to_thread(it.server.wait_for_calls, 1)
        if end == "close":
            sender.writer.transport.abort()
        else:
            sender.writer.write_eof()
        async with asyncio.timeout(10):
            while not (calls := await it.calls(sender.attempt_id)):
                await asyncio.sleep(0.01)
    assert ["no response: the client closed the connection before the answer ended"] == [call.error for call in calls]


@asynccontextmanager
async def speaking(*answers: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """Run a server that gives each request the next of ``answers``, byte for byte, and ends a connection after ``END``.

    Yields its address, and a list with the number of each request's connection.
    """
    left, seen, tasks = list(answers), list[int](), set[asyncio.Task[None]]()
    numbers = iter(range(100))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        number = next(numbers)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                seen.append(number)
                answer = left.pop(0)
                writer.write(answer.removesuffix(b"END"))
                await writer.drain()
                if answer.endswith(b"END"):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def asked(stage: Any, *answers: bytes, calls: int = 1, **settings: Any) -> tuple[list[int], list[int]]:
    """Make calls of a server that answers so; returns their statuses and the connections to the server."""
    async with speaking(*answers) as (address, seen):
        upstreams = [Upstream(name="main_llm", base_url=address)]
        async with stage(upstreams=upstreams, **settings) as it, client(it) as sender:
            statuses: list[int] = []
            for _ in range(calls):
                sender.send(*PLAIN)
                statuses.append(await sender.status())
            return statuses, seen


@pytest.mark.parametrize(
    ("answer", "connections"),
    [
        (WHOLE, [0, 0]),
        (b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + WHOLE, [0, 0]),
        (CHUNKED + b"1;x=y\r\n{\r\n1\r\n}\r\n0\r\nx: trailer\r\n\r\n", [0, 0]),
        (WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), [0, 1]),
        (WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"), [0, 1]),
        (b"HTTP/1.1 200 OK\r\n\r\n{}END", [0, 1]),
        (WHOLE + b"more", [0, 1]),
        (WHOLE + WHOLE, [0, 1]),
    ],
    ids=["whole", "hints", "chunked", "close", "old", "until the end", "longer", "two"],
)
async def test_connection_to_a_server_is_used_again_if_nothing_is_left_on_it(stage, answer: bytes, connections: Any):
    assert ([200, 200], connections) == await asked(stage, answer, answer, calls=2)


@pytest.mark.parametrize(
    "answer",
    [
        b"END",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        WHOLE[:-1] + b"END",
        CHUNKED + b"2\r\n{}\r\nEND",
        CHUNKED + b"zz\r\n{}\r\n",
        WHOLE.replace(b"content-length: 2", b"content-length: 2\r\ncontent-length: 3"),
        WHOLE.replace(b"content-length: 2", b"content-length: 2\r\ntransfer-encoding: chunked"),
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000,
    ],
)
async def test_answer_that_is_not_whole_or_not_http_is_a_502(stage, answer: bytes):
    assert ([502, 200], [0, 1]) == await asked(stage, answer, WHOLE, calls=2)


async def test_server_that_never_ends_its_answer_is_a_504(stage):
    assert ([504, 200], [0, 1]) == await asked(stage, WHOLE[:-1], WHOLE, calls=2, timeout_s=0.3)


async def test_stream_that_breaks_off_ends_the_connection_of_the_client(stage):
    async with (
        speaking(STREAM + b"9\r\ndata: {}\n\r\nEND") as (address, _),
        stage(upstreams=[Upstream(name="main_llm", base_url=address)]) as it,
        client(it) as sender,
    ):
        sender.send(*PLAIN)
        answer = await sender.rest()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"9\r\ndata: {}\n\r\n")


async def test_client_that_reads_slowly_slows_the_server_down(stage):
    event = b"10000\r\n" + b":" * 0xFFFF + b"\n\r\n"
    async with (
        speaking(STREAM + event * 400 + b"0\r\n\r\n") as (address, _),
        stage(upstreams=[Upstream(name="main_llm", base_url=address)]) as it,
        client(it) as sender,
    ):
        sender.send(*PLAIN)
        await asyncio.sleep(0.5)
        answer, size = b"", 0
        while not answer.endswith(b"0\r\n\r\n"):
            answer = answer[-8:] + await sender.reader.read(1 << 16)
            size += len(answer)
    assert size > 400 * 0xFFFF


async def test_calls_at_once_get_their_own_answers_over_connections_that_are_used_again(stage):
    async with stage() as it, client(it) as first, client(it) as second, client(it) as third:
        it.server.respond_with(lambda request: Reply(text=request.turns[-1].text))

        async def call(sender: Client, number: int) -> None:
            for turn in range(40):
                text = f"{number} and {turn}"
                body = json.dumps({"model": "main_llm", "messages": [{"role": "user", "content": text}]}).encode()
                sender.send(b"host: a", b"content-length: %d" % len(body), body=body)
                assert text.encode() in await sender.answer()

        await asyncio.gather(*(call(sender, number) for number, sender in enumerate((first, second, third))))


async def test_connection_whose_request_was_not_sent_whole_is_not_used_again() -> None:
    heads: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno")
        while await reader.read(65_536):
            pass
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions"
    pool = Pool(timeout_s=5.0)
    for body in (b"x" * (20 << 20), b"{}"):
        answer = await pool.post(url, body, {})
        assert 404 == answer.status
        while await answer.content.readany():
            pass
        answer.close()
    assert 2 == len(heads)
    pool.close()
    server.close()
