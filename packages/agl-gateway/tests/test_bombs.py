"""Small bodies that inflate to large ones cost the gateway neither its time nor its memory."""

import asyncio
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
import zstandard

from agl_gateway.relay.bodies import check_values
from agl_gateway.wire.problems import Problem
from agl_testing.waiting import stopwatch

CALL = json.dumps({"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}).encode()
GZIP, ZLIB, RAW = 31, 15, -15
MODEL = "/v1/chat/completions"
PATHS = (MODEL, "/v1/traces", "/store/append_spans", "/settle")
MAX_WAIT_S = 0.5


def packed(piece: bytes, *, count: int = 1, wbits: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, wbits)
    return b"".join([*(packer.compress(piece) for _ in range(count)), packer.flush()])


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    """Return bodies of some 200 KB that decompress to 200 MB, by content encoding."""
    piece, count = b"[" * (1 << 20), 200
    inner = packed(piece, count=count, wbits=GZIP)
    return {
        "gzip": inner,
        "deflate": packed(piece, count=count, wbits=ZLIB),
        "Deflate": packed(piece, count=count, wbits=RAW),
        "zstd": zstandard.compress(b"[" * (200 << 20), 3),
        "gzip, gzip": gzip.compress(inner),
        "br": inner,
    }


@contextlib.asynccontextmanager
async def probed(url: str) -> AsyncIterator[list[float]]:
    """Request ``/healthz`` every 100 ms while the block runs; the list collects the seconds of each answer."""
    waits: list[float] = []

    async def probe() -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                watch = stopwatch()
                async with session.get(f"{url}/healthz") as answer:
                    assert 200 == answer.status
                waits.append(watch())
                await asyncio.sleep(0.1)

    task = asyncio.create_task(probe())
    try:
        yield waits
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def send(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, str]:
    sent = {"Content-Type": "application/x-protobuf" if url.endswith("traces") else "application/json", **headers}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(url, data=io.BytesIO(body), headers=sent) as answer,
    ):
        return answer.status, await answer.text(), answer.headers.get("connection", "")


@pytest.mark.long
@pytest.mark.parametrize("has_token", [False, True])
async def test_bombs_do_not_hold_up_other_requests(stage, bombs, has_token: bool):
    async with stage() as it:
        _, token = await it.open_attempt()
        access = {"Authorization": f"Bearer {token}"} if has_token else {}
        async with probed(it.url) as waits:
            answers = await asyncio.gather(
                *(
                    send(f"{it.url}{path}", body, {"Content-Encoding": encoding, **access})
                    for encoding, body in bombs.items()
                    for path in PATHS
                )
            )
        assert max(waits) < MAX_WAIT_S
        expected = {413, 415} if has_token else {401}
        assert expected == {status for status, _, _ in answers}
        assert {"close"} == {connection for _, _, connection in answers}


@pytest.mark.parametrize("encoding", ["gzip, gzip", "deflate, gzip", "br", "zstd, gzip"])
async def test_encoding_that_the_gateway_does_not_read_is_named(stage, encoding: str):
    async with stage() as it:
        _, token = await it.open_attempt()
        headers = {"Authorization": f"Bearer {token}", "Content-Encoding": encoding}
        status, text, _ = await send(f"{it.url}{MODEL}", b"x", headers)
        assert 415 == status
        assert f"content-encoding '{encoding}'" in text
        assert "send gzip, deflate or zstd" in text


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", packed(CALL, wbits=GZIP)),
        ("x-gzip", packed(CALL, wbits=GZIP)),
        ("deflate", packed(CALL, wbits=ZLIB)),
        ("deflate", packed(CALL, wbits=RAW)),
        ("zstd", zstandard.compress(CALL)),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(CALL)),
        ("identity", CALL),
    ],
    ids=["gzip", "x-gzip", "zlib", "raw", "zstd", "zstd-unsized", "identity"],
)
async def test_compressed_call_is_relayed(stage, encoding: str, body: bytes):
    async with stage() as it:
        _, token = await it.open_attempt()
        headers = {"Authorization": f"Bearer {token}", "Content-Encoding": encoding}
        status, _, connection = await send(f"{it.url}{MODEL}", body, headers)
        assert (200, "") == (status, connection)
        assert "hi" == json.loads(it.server.calls[0].body)["messages"][0]["content"]


WIDE = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, write_content_size=False)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", packed(CALL, wbits=GZIP)[:-9]),
        ("gzip", 2 * packed(CALL, wbits=GZIP)),
        ("zstd", zstandard.compress(CALL)[:-3]),
        ("zstd", 2 * zstandard.compress(CALL)),
        ("zstd", b"not zstd"),
        ("zstd", zstandard.ZstdCompressor(compression_params=WIDE).compress(CALL * 200_000)),
    ],
    ids=["gzip-short", "gzip-twice", "zstd-short", "zstd-twice", "zstd-none", "zstd-window"],
)
async def test_body_that_does_not_end_with_its_stream_is_refused(stage, encoding: str, body: bytes):
    async with stage() as it:
        _, token = await it.open_attempt()
        headers = {"Authorization": f"Bearer {token}", "Content-Encoding": encoding}
        status, text, _ = await send(f"{it.url}{MODEL}", body, headers)
        assert 400 == status
        assert f"content-encoding '{encoding}'" in text


@pytest.mark.parametrize("values", [b"[],", b"[[[]]],", b'"",1,'])
async def test_body_of_millions_of_values_is_refused_and_holds_up_nobody(stage, values: bytes):
    async with stage() as it:
        _, token = await it.open_attempt()
        body = b'{"model": "main_llm", "messages": [' + values * (60_000_000 // len(values)) + b"0]}"
        async with probed(it.url) as waits:
            answer = await send(f"{it.url}{MODEL}", body, {"Authorization": f"Bearer {token}"})
        assert (413, True) == (answer[0], "too_many_values" in answer[1])
        assert max(waits) < MAX_WAIT_S


@pytest.mark.parametrize("shift", range(16))
async def test_brackets_in_strings_do_not_count_wherever_a_body_is_cut(shift: int):
    """The repeated text takes 16 bytes as JSON, so the shifts move each of its bytes to the border of two pieces."""
    text = shift * " " + '\\\\\\"[[[[\\\\' * 60_000
    await check_values(json.dumps([text, [[]] * 190_000]).encode())
    with pytest.raises(Problem, match="more than 200,000 lists"):
        await check_values(json.dumps([text, [[]] * 200_000]).encode())


@pytest.mark.parametrize("text", ["[{" * 150_000, '\\"[[' * 150_000], ids=["plain", "escaped"])
async def test_long_text_is_no_body_of_many_values(stage, text: str):
    async with stage() as it:
        _, token = await it.open_attempt()
        messages = [{"role": "user", "content": content} for content in ("\\", text)]
        body = json.dumps({"model": "main_llm", "messages": messages}).encode()
        status, _, _ = await send(f"{it.url}{MODEL}", body, {"Authorization": f"Bearer {token}"})
        assert 200 == status
        assert text == json.loads(it.server.calls[0].body)["messages"][1]["content"]
