"""Model calls recorded in the process, with real clients and sockets and without a gateway."""

import asyncio
import dataclasses
import gc
import importlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("agl_testing.model_server", reason="agl-testing is not installed")

from agl import emit_message, operation
from agl.contracts import Upstream
from agl.schemas import ModelCall, Span, unpack_ids
from agl.tracing import ActiveAttempt, SpanRecorder, activate
from agl_testing.model_server import Cut, Garbage, Reply, ScriptedModelServer, Status

MODULES = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-provider-0123456789"

pytestmark = pytest.mark.skipif(not MODULES, reason="neither httpx nor httpx2 is installed")


@pytest.fixture
def recorder() -> SpanRecorder:
    return SpanRecorder()


@pytest.fixture
def attempt(recorder: SpanRecorder, model_server: ScriptedModelServer) -> ActiveAttempt:
    upstream = Upstream(name="main", base_url=model_server.base_url, model="m", is_trained=True, model_version="v7")
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        upstreams=(upstream,),
    )


@pytest.fixture(params=MODULES)
def http(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.fixture
def openai_client(model_server: ScriptedModelServer) -> Iterator[Any]:
    openai = pytest.importorskip("openai", exc_type=ImportError)
    with openai.OpenAI(base_url=model_server.base_url, api_key=KEY, max_retries=2) as client:
        yield client


def only(recorder: SpanRecorder) -> tuple[Span, ModelCall]:
    spans = recorder.drain()
    assert len(spans) == 1
    assert spans[0].call is not None
    return spans[0], spans[0].call


def asked_ids(server: ScriptedModelServer) -> tuple[list[int], list[int]]:
    """Return the prompt and response ids that the server sent with its newest plain answer."""
    sent = json.loads(server.calls[-1].sent)
    return sent["prompt_token_ids"], sent["choices"][0]["token_ids"]


def test_a_plain_call_is_recorded_with_its_tokens(
    attempt: ActiveAttempt, recorder: SpanRecorder, openai_client: Any, model_server: ScriptedModelServer
):
    model_server.enqueue(Reply(text="four"))
    with activate(attempt):
        answer = openai_client.chat.completions.create(**CHAT)
    span, call = only(recorder)
    assert answer.choices[0].message.content == "four"
    assert asked_ids(model_server) == (unpack_ids(call.prompt_ids), unpack_ids(call.response_ids))
    assert ("", call.response_len) == (call.ids_missing, len(call.logprobs) // 4)
    assert ("main", "v7", "chat", "m", 200) == (
        call.policy,
        call.model_version,
        call.dialect,
        call.model,
        call.status_code,
    )
    assert CHAT == call.request
    assert ("chat m", "client", "ok", "1" * 16, "a" * 32) == (
        span.name,
        span.kind,
        span.status,
        span.parent_id,
        span.trace_id,
    )
    assert 0 < call.first_token_s <= call.latency_s < 10


def test_a_streamed_call_is_recorded_like_a_plain_one(
    attempt: ActiveAttempt, recorder: SpanRecorder, openai_client: Any, model_server: ScriptedModelServer
):
    model_server.enqueue(Reply(text="one two three"), Reply(text="one two three", chunks=5))
    with activate(attempt):
        openai_client.chat.completions.create(**CHAT)
        text = "".join(
            chunk.choices[0].delta.content or "" for chunk in openai_client.chat.completions.create(**CHAT, stream=True)
        )
    plain, streamed = (span.call for span in recorder.drain())
    assert text == "one two three"
    assert plain is not None
    assert streamed is not None
    assert (True, True, "stop") == (streamed.is_streamed, streamed.is_complete, streamed.finish_reason)
    assert (plain.prompt_ids, plain.response_ids, plain.logprobs) == (
        streamed.prompt_ids,
        streamed.response_ids,
        streamed.logprobs,
    )


def test_async_calls_are_recorded(attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer):
    openai = pytest.importorskip("openai", exc_type=ImportError)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=model_server.base_url, api_key=KEY) as client:
            with activate(attempt):
                await client.chat.completions.create(**CHAT)
                async for _ in await client.chat.completions.create(**CHAT, stream=True):
                    pass
                await client.responses.create(model="m", input="hi")
                await client.embeddings.create(model="m", input="hi")

    asyncio.run(run())
    calls = [span.call for span in recorder.drain() if span.call]
    assert ["chat", "chat", "responses", "embeddings"] == [call.dialect for call in calls]
    assert [True, True, True, True] == [call.is_complete for call in calls]
    assert [False, True, False, False] == [call.is_streamed for call in calls]


def test_anthropic_calls_are_recorded(
    attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer
):
    anthropic = pytest.importorskip("anthropic", exc_type=ImportError)
    with anthropic.Anthropic(base_url=model_server.url, api_key=KEY) as client, activate(attempt):
        client.messages.create(max_tokens=5, **CHAT)
        with client.messages.stream(max_tokens=5, **CHAT) as stream:
            stream.until_done()
    calls = [span.call for span in recorder.drain() if span.call]
    assert [("messages", True), ("messages", True)] == [(call.dialect, call.is_complete) for call in calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("read", ["iter_bytes", "iter_raw", "iter_lines", "read"])
def test_every_way_to_read_gets_the_servers_bytes(
    http: Any,
    attempt: ActiveAttempt,
    recorder: SpanRecorder,
    model_server: ScriptedModelServer,
    stream: bool,
    read: str,
):
    body = {**CHAT, "stream": stream}
    with (
        http.Client() as client,
        activate(attempt),
        client.stream("POST", f"{model_server.base_url}/chat/completions", json=body) as response,
    ):
        found = response.read() if read == "read" else list(getattr(response, read)())
    sent = model_server.calls[-1].sent
    if read != "iter_lines":
        assert sent == (found if read == "read" else b"".join(found))
    call = only(recorder)[1]
    assert (stream, True, "") == (call.is_streamed, call.is_complete, call.ids_missing)


@pytest.mark.parametrize("read", ["aiter_bytes", "aiter_raw", "aread"])
def test_every_async_way_to_read_gets_the_servers_bytes(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer, read: str
):
    async def run() -> bytes:
        body = {**CHAT, "stream": True}
        async with http.AsyncClient() as client:
            with activate(attempt):
                async with client.stream("POST", f"{model_server.base_url}/chat/completions", json=body) as response:
                    if read == "aread":
                        return await response.aread()
                    return b"".join([chunk async for chunk in getattr(response, read)()])

    found = asyncio.run(run())
    assert model_server.calls[-1].sent == found
    assert only(recorder)[1].is_complete


def test_chunks_arrive_before_the_stream_ends(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer
):
    model_server.enqueue(Reply(text="abcdef", chunks=6, chunk_delay=0.05))
    with (
        http.Client() as client,
        activate(attempt),
        client.stream("POST", f"{model_server.base_url}/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        next(response.iter_raw())
        assert not model_server.calls[-1].is_complete
    call = only(recorder)[1]
    assert 0 < call.first_token_s <= call.latency_s
    assert not call.is_complete


def test_a_stream_closed_early_is_incomplete(
    attempt: ActiveAttempt, recorder: SpanRecorder, openai_client: Any, model_server: ScriptedModelServer
):
    model_server.enqueue(Reply(text="a b c d e f", chunks=6, chunk_delay=0.01))
    with activate(attempt), openai_client.chat.completions.create(**CHAT, stream=True) as stream:
        next(iter(stream))
    span, call = only(recorder)
    assert (False, "error") == (call.is_complete, span.status)


def test_a_stream_left_open_is_recorded_when_the_attempt_ends(
    attempt: ActiveAttempt, recorder: SpanRecorder, openai_client: Any
):
    with activate(attempt):
        stream = openai_client.chat.completions.create(**CHAT, stream=True)
        next(stream)
    assert not only(recorder)[1].is_complete
    stream.close()
    assert recorder.drain() == []
    assert len(attempt.spans) == 0


def test_a_stream_that_is_dropped_is_recorded_at_once(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer
):
    with http.Client() as client, activate(attempt):
        request = client.build_request("POST", f"{model_server.base_url}/chat/completions", json=CHAT)
        response = client.send(request, stream=True)
        del response
        gc.collect()
        assert not only(recorder)[1].is_complete


def test_retries_share_their_request_id(
    attempt: ActiveAttempt, recorder: SpanRecorder, openai_client: Any, model_server: ScriptedModelServer
):
    model_server.enqueue(Status(code=500), Status(code=429, retry_after=0.01), Reply(text="ok"))
    with activate(attempt):
        openai_client.chat.completions.create(**CHAT)
        openai_client.chat.completions.create(**CHAT)
    calls = [span.call for span in recorder.drain() if span.call]
    assert [(500, 0), (429, 1), (200, 2), (200, 0)] == [(call.status_code, call.retry_count) for call in calls]
    assert len({call.request_id for call in calls[:3]}) == 1
    assert calls[3].request_id != calls[2].request_id
    assert [True, True, False, False] == [bool(call.error) for call in calls]


def test_a_failure_of_the_client_passes_through_and_is_recorded(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder
):
    with http.Client() as client, activate(attempt):
        request = client.build_request("POST", "http://127.0.0.1:9/v1/chat/completions", json=CHAT)
        with pytest.raises(http.ConnectError) as caught:
            client.send(request)
    assert caught.value.request.url == request.url
    span, call = only(recorder)
    assert (0, "error", False) == (call.status_code, span.status, call.is_complete)
    assert "ConnectError" in call.error


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_recorded_as_such(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer, stream: bool
):
    model_server.enqueue(Cut(after_chunks=2, reply=Reply(text="a b c d")))
    with http.Client() as client, activate(attempt), pytest.raises(http.RemoteProtocolError):
        client.post(f"{model_server.base_url}/chat/completions", json={**CHAT, "stream": stream})
    assert not only(recorder)[1].is_complete


def test_a_cancelled_call_is_recorded(
    attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer
):
    openai = pytest.importorskip("openai", exc_type=ImportError)
    model_server.enqueue(Reply(text="late", delay=5.0))

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=model_server.base_url, api_key=KEY) as client:
            with activate(attempt), pytest.raises(TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(**CHAT), 0.2)

    asyncio.run(run())
    assert "CancelledError" in only(recorder)[1].error


def test_garbage_is_recorded_and_left_to_the_client(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer
):
    model_server.enqueue(Garbage())
    with http.Client() as client, activate(attempt):
        response = client.post(f"{model_server.base_url}/chat/completions", json=CHAT)
    assert response.content == b"<html>it works!</html>"
    assert "not what the API promises" in only(recorder)[1].error


def test_a_call_to_another_model_is_recorded_and_never_altered(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder
):
    with ScriptedModelServer() as other, http.Client() as client:
        plain = client.build_request("POST", f"{other.base_url}/chat/completions", json={**CHAT, "model": "frozen"})
        expected = (plain.content, dict(plain.headers))
        with activate(attempt):
            client.send(plain)
        seen = other.calls[0]
    assert expected[0] == seen.body
    assert expected[1] == {name: seen.headers[name] for name in expected[1]}
    assert not [name for name in seen.headers if name.startswith(("x-agl", "traceparent"))]
    call = only(recorder)[1]
    assert ("frozen", "") == (call.model, call.policy)


def test_the_clients_own_request_is_not_altered(http: Any, attempt: ActiveAttempt, model_server: ScriptedModelServer):
    with http.Client() as client, activate(attempt):
        request = client.build_request("POST", f"{model_server.base_url}/chat/completions", json=CHAT)
        before = (request.content, dict(request.headers), str(request.url))
        response = client.send(request)
        assert response.request is request
        assert before == (request.content, dict(request.headers), str(request.url))
        client.send(request)
    assert len(model_server.calls) == 2


def test_the_span_around_a_call_is_its_parent(attempt: ActiveAttempt, recorder: SpanRecorder, openai_client: Any):
    with activate(attempt), operation("plan") as plan:
        openai_client.chat.completions.create(**CHAT)
    chat, _ = recorder.drain()
    assert plan.span_id == chat.parent_id


def test_secrets_reach_neither_spans_nor_logs(
    attempt: ActiveAttempt, recorder: SpanRecorder, openai_client: Any, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    with activate(attempt):
        openai_client.chat.completions.create(**CHAT)
        emit_message(f"my key is {KEY}")
    assert KEY not in repr(recorder.drain())
    assert KEY not in caplog.text


def test_nothing_is_recorded_outside_a_rollout(
    attempt: ActiveAttempt, recorder: SpanRecorder, openai_client: Any, model_server: ScriptedModelServer
):
    with activate(attempt):
        pass
    openai_client.chat.completions.create(**CHAT)
    assert recorder.drain() == []
    assert b"return_token_ids" not in model_server.calls[0].body


def test_a_client_that_wraps_another_is_recorded_once(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder, model_server: ScriptedModelServer
):
    class Wrapping(http.Client):  # type: ignore[misc, name-defined]
        def send(self, request: Any, **options: Any) -> Any:
            return super().send(request, **options)

    class Forwarding(http.BaseTransport):  # type: ignore[misc, name-defined]
        def handle_request(self, request: Any) -> Any:
            with http.Client() as inner:
                return inner.send(request)

    with Wrapping(transport=Forwarding()) as client, activate(attempt):
        client.post(f"{model_server.base_url}/chat/completions", json=CHAT)
    assert len(recorder.drain()) == 1


def test_compressed_streams_are_decoded_for_the_record(http: Any, attempt: ActiveAttempt, recorder: SpanRecorder):
    import gzip

    answer = b'{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'

    def respond(request: Any) -> Any:
        packed = gzip.compress(answer)
        return http.Response(200, headers={"content-encoding": "gzip"}, stream=Pieces([packed[:20], packed[20:]]))

    class Pieces(http.SyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, pieces: list[bytes]) -> None:
            self.pieces = pieces

        def __iter__(self) -> Iterator[bytes]:
            yield from self.pieces

    with (
        http.Client(transport=http.MockTransport(respond)) as client,
        activate(attempt),
        client.stream("POST", "http://x/v1/chat/completions", json={**CHAT, "model": "z"}) as response,
    ):
        assert answer == response.read()
    assert only(recorder)[1].response["choices"][0]["message"]["content"] == "hi"


def test_a_failure_of_the_hook_leaves_the_call_as_it_was(
    http: Any,
    attempt: ActiveAttempt,
    recorder: SpanRecorder,
    model_server: ScriptedModelServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with http.Client() as client, activate(attempt):
        for name in ("agl.tracing._wire.hook.route_of", "agl.tracing._wire.open_call.calls_of"):
            with monkeypatch.context() as patch:
                patch.setattr(name, broken)
                assert client.post(f"{model_server.base_url}/chat/completions", json=CHAT).status_code == 200
    assert recorder.drain() == []
    assert [ZeroDivisionError, ZeroDivisionError] == [entry.exc_info[0] for entry in caplog.records if entry.exc_info]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/v1/messages", {"to": "#ops", "text": "secret of a person"}),
        ("/mcp/messages", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}),
        ("/sms/2/messages", {"messages": [{"to": "1", "text": "secret of a person"}]}),
        ("/forms/7/responses", {"answers": ["secret of a person"]}),
        ("/api/completions", {"course": 7}),
    ],
)
def test_requests_that_only_look_like_model_calls_are_neither_recorded_nor_redirected(
    http: Any, attempt: ActiveAttempt, recorder: SpanRecorder, path: str, body: Any
):
    asked: list[str] = []

    def respond(request: Any) -> Any:
        asked.append(str(request.url))
        return http.Response(200, json={})

    every_call = msgspec.structs.replace(attempt.upstreams[0], agents=".*")
    for upstreams in (attempt.upstreams, (every_call,)):
        with (
            activate(dataclasses.replace(attempt, upstreams=upstreams, gateway_url="http://gateway:4747")),
            operation("sender", kind="agent"),
            http.Client(transport=http.MockTransport(respond)) as client,
        ):
            client.post(f"http://chat.example{path}", json=body)

    assert [f"http://chat.example{path}"] * 2 == asked
    assert "secret" not in repr(recorder.drain())
