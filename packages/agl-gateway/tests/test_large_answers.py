"""Answers that are too large or unreadable end with an error of the client's API, and are recorded with the reason."""

import gzip
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
import zstandard
from aiohttp import web

from agl.contracts import Upstream
from agl_testing.model_server import Reply

from .conftest import listening

LIMIT = 20_000
REASON = f"the backend's answer is larger than {LIMIT} bytes"
LONG = Reply(text="word " * LIMIT, chunks=200)
HI: Any = [{"role": "user", "content": "hi"}]


async def chat(it: Any, token: str, **settings: Any) -> list[Any]:
    async with it.openai(token) as client:
        return [part async for part in await client.chat.completions.create(messages=HI, stream=True, **settings)]


async def responses(it: Any, token: str, **settings: Any) -> list[Any]:
    async with it.openai(token) as client:
        events = [event async for event in await client.responses.create(input="hi", stream=True, **settings)]
    if (error := getattr(events[-1].response, "error", None)) is not None:
        raise openai.APIError(error.message, None, body=None)  # type: ignore[arg-type]
    return events


async def messages(it: Any, token: str, **settings: Any) -> list[Any]:
    async with anthropic.AsyncAnthropic(base_url=it.url, api_key=token, max_retries=0) as client:
        return [e async for e in await client.messages.create(max_tokens=9, messages=HI, stream=True, **settings)]


@pytest.mark.parametrize("is_trained", [True, False], ids=["translated", "native"])
@pytest.mark.parametrize("ask", [chat, responses, messages])
async def test_stream_beyond_the_limit_ends_with_an_error_event_and_is_recorded_as_cut(stage, ask, is_trained: bool):
    async with stage(max_answer=LIMIT, is_trained=is_trained) as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(LONG, Reply(text="short"))
        with pytest.raises((openai.APIError, anthropic.APIError), match="answer is larger than"):
            await ask(it, token, model="main_llm")
        await ask(it, token, model="main_llm")
        cut, whole = await it.calls(attempt_id)
    assert (200, False, True) == (cut.status_code, cut.is_complete, cut.error.startswith(REASON))
    assert (True, "") == (whole.is_complete, whole.error)


async def test_plain_answer_beyond_the_limit_is_a_recorded_502(stage):
    async with stage(max_answer=LIMIT) as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(LONG)
        async with it.openai(token) as client:
            with pytest.raises(openai.InternalServerError, match="answer is larger than") as caught:
                await client.chat.completions.create(model="main_llm", messages=HI)
        (call,) = await it.calls(attempt_id)
    assert (502, "answer_too_large") == (caught.value.status_code, caught.value.code)
    assert (502, True) == (call.status_code, REASON in call.error)


def bomb() -> bytes:
    """Return 100 KB of gzip, which grow to 100 MB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(b"data: {}\n\n" * 100_000) for _ in range(100)), packer.flush()])


@asynccontextmanager
async def answering(body: bytes, *, encoding: str, content_type: str, status: int = 200) -> AsyncIterator[str]:
    """Run a server that answers every request with ``body``."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(
            body=body, status=status, headers={"content-encoding": encoding, "content-type": content_type}
        )

    async with listening(answer) as address:
        yield f"{address}/v1"


TYPES = ("text/event-stream", "application/json")
ANSWER = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n' * 50


@pytest.mark.parametrize("content_type", TYPES)
async def test_compressed_answer_counts_by_its_decompressed_size(stage, content_type: str):
    async with (
        answering(bomb(), encoding="gzip", content_type=content_type) as address,
        stage(max_answer=LIMIT, upstreams=[Upstream(name="main_llm", base_url=address)]) as it,
    ):
        attempt_id, token = await it.open_attempt()
        with pytest.raises(openai.APIError, match="answer is larger than"):
            await chat(it, token, model="main_llm")
        (call,) = await it.calls(attempt_id)
    assert REASON in call.error


@pytest.mark.parametrize("content_type", TYPES)
@pytest.mark.parametrize(
    ("encoding", "body", "reason"),
    [
        ("gzip", ANSWER, "answer is not the gzip that its content-encoding header says"),
        ("gzip", gzip.compress(ANSWER)[:-4], "answer is not the gzip that its content-encoding header says"),
        ("gzip", gzip.compress(ANSWER) + b"more", "answer is not the gzip that its content-encoding header says"),
        ("zstd", ANSWER, "answer is not the zstd that its content-encoding header says"),
        ("br", ANSWER, "answer has the content-encoding 'br', and the gateway reads gzip, deflate or zstd only"),
        ("gzip, gzip", ANSWER, "answer has the content-encoding 'gzip, gzip'"),
    ],
    ids=["plain", "truncated", "continued", "zstd", "brotli", "twice"],
)
async def test_answer_in_another_encoding_than_its_header_names_is_an_error_that_says_so(
    stage, content_type: str, encoding: str, body: bytes, reason: str
):
    async with (
        answering(body, encoding=encoding, content_type=content_type) as address,
        stage(upstreams=[Upstream(name="main_llm", base_url=address)]) as it,
    ):
        attempt_id, token = await it.open_attempt()
        with pytest.raises(openai.APIError, match=reason):
            await chat(it, token, model="main_llm")
        (call,) = await it.calls(attempt_id)
    assert reason in call.error


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_compressed_stream_reaches_the_client_uncompressed(stage, encoding: str):
    body = gzip.compress(ANSWER) if encoding == "gzip" else zstandard.compress(ANSWER)
    async with (
        answering(body, encoding=encoding, content_type=TYPES[0]) as address,
        stage(upstreams=[Upstream(name="main_llm", base_url=address)]) as it,
    ):
        _, token = await it.open_attempt()
        parts = await chat(it, token, model="main_llm")
    assert ["hi"] * 50 == [part.choices[0].delta.content for part in parts]


async def test_only_the_gateway_sets_headers_that_browsers_and_its_own_clients_obey(stage):
    given = {"Access-Control-Allow-Origin": "*", "Location": "/", "Set-Cookie": "a=b", "X-Agl-Dropped": "forged"}
    async with stage() as it:
        _, token = await it.open_attempt()
        it.server.enqueue(Reply(text="hi", headers={**given, "x-request-id": "r1"}))
        async with it.openai(token) as client:
            found = await client.chat.completions.with_raw_response.create(model="main_llm", messages=HI)
    assert [None] * 4 == [found.headers.get(name) for name in given]
    assert "r1" == found.headers["x-request-id"]


CHAT = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        *(("utf-8", CHAT), ("", CHAT), ("none", CHAT), ("identity, identity", CHAT)),
        *(("gzip, identity", gzip.compress(CHAT)), ("gzip", gzip.compress(CHAT[:40]) + gzip.compress(CHAT[40:]))),
    ],
    ids=["charset", "empty", "none", "identity", "gzip", "members"],
)
async def test_answer_that_clients_can_read_reaches_them(stage, encoding: str, body: bytes):
    async with (
        answering(body, encoding=encoding, content_type=TYPES[1]) as address,
        stage(upstreams=[Upstream(name="main_llm", base_url=address)]) as it,
    ):
        _, token = await it.open_attempt()
        async with it.openai(token) as client:
            found = await client.chat.completions.create(model="main_llm", messages=HI)
    assert "hi" == found.choices[0].message.content


@pytest.mark.parametrize("has_spool", [False, True])
@pytest.mark.parametrize("is_trained", [True, False], ids=["translated", "native"])
async def test_stream_whose_last_event_is_here_is_complete_without_the_trailer_of_gzip(
    stage, tmp_path, is_trained: bool, has_spool: bool
):
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    ended = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    body = packer.compress(ANSWER + ended) + packer.flush(zlib.Z_SYNC_FLUSH)
    async with (
        answering(body, encoding="gzip", content_type=TYPES[0]) as address,
        stage(
            upstreams=[Upstream(name="main_llm", base_url=address, is_trained=is_trained)],
            spool=str(tmp_path) if has_spool else "off",
        ) as it,
    ):
        attempt_id, token = await it.open_attempt()
        events = await (messages if is_trained else chat)(it, token, model="main_llm")
        (call,) = await it.calls(attempt_id)
    assert not is_trained or "message_stop" == events[-1].type
    assert (True, "") == (call.is_complete, call.error)


async def test_unreadable_answer_is_asked_of_the_next_server_and_an_empty_one_keeps_its_status(stage):
    async with (
        answering(b"x", encoding="br", content_type=TYPES[1]) as bad,
        answering(CHAT, encoding="identity", content_type=TYPES[1]) as good,
        answering(b"", encoding="br", content_type=TYPES[1], status=503) as empty,
        stage(
            upstreams=[
                Upstream(name="main_llm", base_url=bad, replicas=[good]),
                Upstream(name="empty", base_url=empty),
                Upstream(name="bad", base_url=bad),
            ]
        ) as it,
    ):
        for _ in range(6):  # a server is chosen by the rollout
            _, token = await it.open_attempt()
            async with it.openai(token) as client:
                found = await client.chat.completions.create(model="main_llm", messages=HI)
                assert "hi" == found.choices[0].message.content
        async with it.openai(token) as client:
            for model, status in (("empty", 503), ("bad", 502)):
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(model=model, messages=HI)
                assert status == caught.value.status_code
