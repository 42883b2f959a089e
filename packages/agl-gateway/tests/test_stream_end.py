"""A stream ends with its last event, whatever its text says, and no client sees that event too early."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl.contracts import Upstream
from agl.dialects import call_messages
from agl_gateway.relay import sender as streams
from agl_gateway.relay.sender import StreamEnd
from agl_testing.model_server import Reply

from .conftest import listening
from .test_relay import BODIES, NATIVE
from .test_spool import FickleStore, open_attempt

MARKS = ("[DONE]", "message_stop", "response.completed", "response.incomplete", "response.failed")
REASONS = {"/chat/completions": "stop", "/completions": "stop", "/responses": "completed", "/messages": "end_turn"}
GOOGLE = "/v1beta/models/main_llm:streamGenerateContent?alt=sse"

SILENCE_S = 0.15
"""Longer than a body may stay open after the last event in tests with ``quick_end``."""

PIECES = (*(f"print('data: {mark}\\n\\n') " for mark in MARKS), "and that is all")
SPEECH = Reply(text="".join(PIECES), chunks=PIECES, chunk_delay=SILENCE_S)
"""An answer whose text contains the end marks of all streams, with a pause after each."""

SPOKEN = "".join(f'data: {mark}\\n\\nevent: {mark}\\ndata: {{\\"type\\": \\"{mark}\\"}}\\r\\n' for mark in MARKS)
"""Text that contains the end marks of all streams, as it appears inside a JSON string."""

CHAT = 'data: {"choices": [{"index": 0, "delta": {"content": "%s"}, "finish_reason": %s}]}\n\n'
DELTA = 'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "%s"}\n\n'
BLOCK = 'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"text": "%s"}}\n\n'
ITEM = (
    'data: {"item": {"type": "message", "text": "%s", "name": "message_stop"}, "type": "response.output_item.done"}\n\n'
)

ENDS = (
    "data: [DONE]\n\n",
    "data:[DONE]\r\n\r\n",
    'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    'data: {"type": "message_stop"}\n\n',
    "event:message_stop\r\ndata:{}\r\n\r\n",
    f'data: {{"response": {{"output": ["{SPOKEN}"]}}, "type": "response.completed"}}\r\n\r\n',
    'event: response.incomplete\ndata: {"type": "response.incomplete", "response": {}}\n\n',
    'data: {"type": "response.failed", "response": {}}\n\n',
)


def before(end: str) -> str:
    """Return the events before the event ``end``; their text mentions it."""
    return "".join(event % SPOKEN for event in (DELTA, BLOCK, ITEM)) + CHAT % (SPOKEN, "null") + ": [DONE]\n\n"


@pytest.mark.parametrize("end", ENDS)
def test_end_is_found_at_the_last_byte_of_its_event_in_whatever_pieces_it_arrives(end: str) -> None:
    said = before(end).encode()
    data = said + end.encode()
    for cut in range(1, len(data)):
        found = StreamEnd()
        found.feed(data[:cut])
        assert not found.is_here
        assert not (found.has_begun and cut <= len(said))
        found.feed(data[cut:])
        assert found.is_here
    found, here = StreamEnd(), list[bool]()
    for at in range(len(data)):
        found.feed(data[at : at + 1])
        here.append(found.is_here)
    assert [False] * (len(data) - 1) + [True] == here


@pytest.mark.parametrize(
    "data",
    [
        'data: {"type": "message_stop", "broken\n\n',
        'data: {"type": ["message_stop"]}\n\n',
        'data: ["message_stop"]\n\n',
        'data: "[DONE]"\n\n',
        'data: {"error": {"type": "message_stop"}}\n\n',
        'data: {"type": "message_stop", "x": ' + "[" * 100_000 + "\n\n",
        "data: [DONE] and more\n\n",
        "id: [DONE]\nretry: message_stop\n\n",
        "event: message_stopped\n\n",
        "[DONE]\nmessage_stop\n\n",
    ],
)
def test_what_only_looks_like_an_end_is_none(data: str) -> None:
    found = StreamEnd()
    found.feed(data.encode())
    assert (False, False) == (found.has_begun, found.is_here)


async def streamed(it: Any, token: str, path: str, body: Any) -> str:
    """Return the bytes of a streamed answer as text; raises if the connection breaks off."""
    headers = {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(it.url + path, json=body) as reply:
        assert 200 == reply.status
        return await reply.text()


@pytest.fixture
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that a body may stay open after the last event of its stream."""
    monkeypatch.setattr(streams, "_END_OF_BODY_S", 0.05)


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.usefixtures("quick_end")
async def test_answer_about_ends_of_streams_arrives_whole_after_a_silence(stage, tmp_path: Path, endpoint: str) -> None:
    async with stage(native_apis=NATIVE, spool=str(tmp_path)) as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(SPEECH)
        received = await streamed(it, token, f"/v1{endpoint}", {**BODIES[endpoint], "stream": True})
        (call,) = await it.calls(attempt_id)
    assert it.server.calls[0].sent.decode() == received
    assert SPEECH.text == call_messages(call)[-1]["content"]
    assert (REASONS[endpoint], True, "") == (call.finish_reason, call.is_complete, call.error)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", GOOGLE])
@pytest.mark.usefixtures("quick_end")
async def test_translated_answer_about_ends_of_streams_arrives_whole_after_a_silence(
    stage, tmp_path: Path, path: str
) -> None:
    body = {"contents": [{"parts": [{"text": "hi"}]}]} if path == GOOGLE else BODIES[path.removeprefix("/v1")]
    async with stage(spool=str(tmp_path)) as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(SPEECH)
        received = await streamed(it, token, path, {**body, "stream": True} if path != GOOGLE else body)
        (call,) = await it.calls(attempt_id)
    assert PIECES[-1] in received
    assert any(end in received for end in ('"type":"message_stop"', '"type":"response.completed"', '"STOP"'))
    assert SPEECH.text == call_messages(call)[-1]["content"]
    assert ("stop", True, "") == (call.finish_reason, call.is_complete, call.error)


class Backend:
    """A server that streams pieces with a pause between them, and ends the body when the test tells it to."""

    def __init__(self, pieces: list[str], *, pause_s: float) -> None:
        self._pieces = pieces
        self._pause_s = pause_s
        self.may_end = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for piece in self._pieces:
            await reply.write(piece.encode())
            await asyncio.sleep(self._pause_s)
        await self.may_end.wait()
        return reply


@asynccontextmanager
async def streaming(*pieces: str, pause_s: float = 0.0) -> AsyncIterator[tuple[Backend, list[Upstream]]]:
    """Run a backend that streams ``pieces`` and leaves the body open; yields it with its policy's upstream."""
    backend = Backend(list(pieces), pause_s=pause_s)
    async with listening(backend.handle) as address:
        try:
            yield backend, [Upstream(name="main_llm", base_url=f"{address}/v1")]
        finally:
            backend.may_end.set()


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def answer_of(endpoint: str) -> list[str]:
    """Return the events of an answer whose text contains end marks; the last event is a separate item."""
    text = "print('[DONE] message_stop response.completed')"
    if endpoint == "/chat/completions":
        return [CHAT % (text, "null"), CHAT % ("", '"stop"'), "data: [DONE]\n\n"]
    if endpoint == "/messages":
        delta = {"type": "text_delta", "text": text}
        return [
            event("message_start", message={"id": "1", "role": "assistant", "content": []}),
            event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            event("content_block_delta", index=0, delta=delta),
            event("message_delta", delta={"stop_reason": "end_turn"}),
            event("message_stop"),
        ]
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    return [
        event("response.created", response={"id": "1", "status": "in_progress", "output": []}),
        event("response.output_text.delta", delta=text),
        event("response.output_item.done", output_index=0, item=output[0]),
        event("response.completed", response={"id": "1", "status": "completed", "output": output}),
    ]


@pytest.mark.parametrize("endpoint", ["/chat/completions", "/responses", "/messages"])
@pytest.mark.usefixtures("quick_end")
async def test_last_event_ends_the_stream_though_the_body_stays_open_and_its_pieces_are_slow(
    stage, tmp_path: Path, endpoint: str
) -> None:
    """If the gateway waited for the backend's silence instead, the test would take 600 seconds."""
    *said, last = answer_of(endpoint)
    pieces = [*said, *(last[at:end] for at, end in pairwise([0, 4, 9, len(last) - 2, len(last) - 1, len(last)]))]
    async with (
        streaming(*pieces, pause_s=0.2) as (_, upstreams),
        stage(upstreams=upstreams, native_apis=NATIVE, spool=str(tmp_path)) as it,
    ):
        attempt_id, token = await it.open_attempt()
        received = await streamed(it, token, f"/v1{endpoint}", {**BODIES[endpoint], "stream": True})
        (call,) = await it.calls(attempt_id)
    assert "".join(pieces) == received
    assert (REASONS[endpoint], True, "") == (call.finish_reason, call.is_complete, call.error)


@pytest.mark.parametrize("endpoint", ["/chat/completions", "/responses", "/messages"])
async def test_last_event_and_the_end_of_the_body_end_the_stream_at_once(
    stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(streams, "_END_OF_BODY_S", 300.0)
    async with streaming(*answer_of(endpoint)) as (backend, upstreams):
        backend.may_end.set()
        async with stage(upstreams=upstreams, native_apis=NATIVE, spool=str(tmp_path)) as it:
            attempt_id, token = await it.open_attempt()
            received = await streamed(it, token, f"/v1{endpoint}", {**BODIES[endpoint], "stream": True})
            (call,) = await it.calls(attempt_id)
    assert "".join(answer_of(endpoint)) == received
    assert call.is_complete


@pytest.mark.parametrize(("endpoint", "cut"), [("/responses", -3), ("/messages", len("event: message_stop\n"))])
@pytest.mark.usefixtures("quick_end")
async def test_silence_within_the_last_event_is_an_error(stage, tmp_path: Path, endpoint: str, cut: int) -> None:
    *said, last = answer_of(endpoint)
    async with (
        streaming(*said, last[:cut]) as (_, upstreams),
        stage(upstreams=upstreams, native_apis=NATIVE, spool=str(tmp_path), timeout_s=0.5) as it,
    ):
        attempt_id, token = await it.open_attempt()
        with pytest.raises(aiohttp.ClientPayloadError):
            await streamed(it, token, f"/v1{endpoint}", {**BODIES[endpoint], "stream": True})
        (call,) = await it.calls(attempt_id)
    assert not call.is_complete
    assert "the backend's stream broke off" in call.error


@pytest.mark.parametrize("endpoint", ["/chat/completions", "/responses", "/messages"])
async def test_last_event_is_held_back_until_the_call_is_durable(serving, tmp_path: Path, endpoint: str) -> None:
    *said, last = answer_of(endpoint)
    store = FickleStore()
    store.takes.clear()
    async with streaming(*said, last[:-1], last[-1:], pause_s=0.1) as (backend, (upstream,)):
        backend.may_end.set()
        settings = {"native_apis": tuple(NATIVE), "spool_after_s": 300.0}
        async with serving(backend=upstream.base_url, store=store, spool=tmp_path, **settings) as it:
            _, token = await open_attempt(it)
            headers, body = {"authorization": f"Bearer {token}"}, {**BODIES[endpoint], "stream": True}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{it.url}/v1{endpoint}", json=body) as reply,
            ):
                before = b""
                with suppress(TimeoutError):
                    while chunk := await asyncio.wait_for(reply.content.readany(), 1.0):
                        before += chunk
                store.takes.set()
                after = await reply.read()
    assert "".join([*said, last]).encode() == before + after
    assert last.encode() in after
