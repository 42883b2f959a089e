"""The wire hook with a gateway: tokens are added, calls are redirected, and no other server sees them."""

import asyncio
import importlib
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("agl_testing.model_server", reason="agl-testing is not installed")

from agl import operation
from agl.contracts import Upstream
from agl.tracing import ActiveAttempt, SpanRecorder, WireTracer, activate, open_span
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Status

MODULES = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
KEY = "sk-provider-0123456789"
ELSEWHERE = "http://127.0.0.1:9/v1"
"""The address of clients that were built before the run; no server listens there."""

pytestmark = pytest.mark.skipif(not MODULES, reason="neither httpx nor httpx2 is installed")


def chat(text: str = "hi", model: str = "main") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


@pytest.fixture
def gateway() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer() as server:
        yield server


def attempt(gateway: ScriptedModelServer, recorder: SpanRecorder, number: int = 1, **fields: Any) -> ActiveAttempt:
    settings = {
        "token": f"agl_token{number:08d}.signature",
        "gateway_url": gateway.url,
        "upstreams": (Upstream(name="main", base_url=ELSEWHERE, model="Qwen/Qwen", aliases=("gpt-*",)),),
        **fields,
    }
    return ActiveAttempt(
        rollout_id=f"ro-{number}",
        attempt_id=f"ro-{number}.1",
        trace_id=f"{number:032x}",
        root_span_id=f"{number:016x}",
        record=recorder.record,
        **settings,
    )


@pytest.fixture(params=MODULES)
def http(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def openai() -> Any:
    return pytest.importorskip("openai", exc_type=ImportError)


def test_a_client_built_before_the_run_reaches_the_gateway_with_the_attempts_identity(gateway: ScriptedModelServer):
    recorder = SpanRecorder()
    with openai().OpenAI(base_url=ELSEWHERE, api_key=KEY) as client:
        with activate(attempt(gateway, recorder)), operation("plan") as plan:
            client.chat.completions.create(**chat(model="gpt-4o"))
            client.responses.create(model="Qwen/Qwen", input="hi")
        spans = recorder.drain()
    first, second = gateway.calls
    assert ("/v1/chat/completions", "/v1/responses") == (first.path, second.path)
    for call in (first, second):
        assert call.headers["authorization"] == "Bearer agl_token00000001.signature"
        assert call.headers["traceparent"] == f"00-{1:032x}-{plan.span_id}-01"
        assert call.headers["x-agl-span-id"] == plan.span_id
        assert call.headers["host"] == gateway.url.removeprefix("http://")
        assert KEY not in str(call.headers)
    assert re.fullmatch(r"rq-[0-9a-f]{16}", first.headers["x-agl-request-id"])
    assert first.headers["x-agl-request-id"] != second.headers["x-agl-request-id"]
    assert ["plan"] == [span.name for span in spans], "the gateway records the calls"


def test_the_framework_span_travels_with_the_call(gateway: ScriptedModelServer, http: Any):
    with http.Client() as client, activate(attempt(gateway, SpanRecorder())), open_span(agent="writer") as span:
        client.post(f"{ELSEWHERE}/chat/completions", json=chat())
    assert gateway.calls[0].headers["x-agl-span-id"] == span.span_id


def test_what_the_client_sends_reaches_the_gateway_unchanged(gateway: ScriptedModelServer, http: Any):
    with http.Client(headers={"x-mine": "kept", "api-key": KEY}, cookies={"session": KEY}) as client:
        request = client.build_request("POST", f"{ELSEWHERE}/chat/completions?v=1", json=chat())
        with activate(attempt(gateway, SpanRecorder())):
            response = client.send(request)
        assert response.request is request
        assert str(response.request.url).startswith(ELSEWHERE)
        assert "agl_" not in str(dict(request.headers))
    call = gateway.calls[0]
    assert (request.content, "kept", "/v1/chat/completions?v=1") == (call.body, call.headers["x-mine"], call.path)
    assert KEY not in str(call.headers)


def test_anthropic_clients_reach_the_gateway_with_the_token(gateway: ScriptedModelServer):
    anthropic = pytest.importorskip("anthropic", exc_type=ImportError)
    with (
        anthropic.Anthropic(base_url="http://127.0.0.1:9", api_key=KEY) as client,
        activate(attempt(gateway, SpanRecorder())),
    ):
        client.messages.create(max_tokens=5, **chat())
    call = gateway.calls[0]
    assert call.path == "/v1/messages"
    assert "agl_token00000001.signature" in call.headers.get("x-api-key", call.headers.get("authorization", ""))
    assert KEY not in str(call.headers)


def test_a_client_with_an_api_key_header_sends_the_token_there(gateway: ScriptedModelServer, http: Any):
    with http.Client(headers={"x-api-key": KEY}) as client, activate(attempt(gateway, SpanRecorder())):
        client.post(f"{ELSEWHERE}/messages", json={**chat(), "max_tokens": 5})
    call = gateway.calls[0]
    assert call.headers["x-api-key"] == "agl_token00000001.signature"
    assert "authorization" not in call.headers


def test_calls_straight_to_the_gateway_get_the_identity_too(gateway: ScriptedModelServer, http: Any):
    with http.Client(auth=("user", KEY)) as client, activate(attempt(gateway, SpanRecorder())):
        client.get(f"{gateway.base_url}/models")
        client.post(f"{gateway.base_url}/chat/completions", json=chat(model="unknown"))
    assert ["Bearer agl_token00000001.signature"] * len(gateway.calls) == [
        call.headers["authorization"] for call in gateway.calls
    ]


def test_streams_pass_through_the_gateway_untouched(gateway: ScriptedModelServer, http: Any):
    recorder = SpanRecorder()
    with (
        http.Client() as client,
        activate(attempt(gateway, recorder)),
        client.stream("POST", f"{ELSEWHERE}/chat/completions", json={**chat(), "stream": True}) as response,
    ):
        found = b"".join(response.iter_raw())
    assert gateway.calls[0].sent == found
    assert recorder.drain() == []


@pytest.mark.parametrize("is_installed", [False, True])
def test_calls_to_frozen_models_go_where_they_went_and_never_carry_the_token(
    gateway: ScriptedModelServer, http: Any, is_installed: bool
):
    recorder, tracer = SpanRecorder(), WireTracer()
    if is_installed:
        tracer.install()
        tracer.install()
    try:
        with ScriptedModelServer() as frozen, http.Client() as client, activate(attempt(gateway, recorder)):
            client.post(f"{frozen.base_url}/chat/completions", json=chat(model="judge"), headers={"authorization": KEY})
            client.get(f"{frozen.base_url}/models")
            client.post(f"{frozen.url}/other", json={"model": "main"})
            seen = frozen.calls
    finally:
        tracer.uninstall()
    assert gateway.calls == []
    assert KEY == seen[0].headers["authorization"]
    assert "agl" not in str([call.headers for call in seen])
    assert [["judge"], []][not is_installed] == [span.call.model for span in recorder.drain() if span.call]


def test_a_gateway_that_redirects_elsewhere_does_not_take_the_token_along(http: Any):
    seen: list[Any] = []

    def respond(request: Any) -> Any:
        seen.append(request)
        return http.Response(307, headers={"location": "http://evil.example/v1/chat/completions"})

    with (
        http.Client(transport=http.MockTransport(respond), follow_redirects=True) as client,
        ScriptedModelServer() as g,
        activate(attempt(g, SpanRecorder())),
    ):
        assert client.post(f"{ELSEWHERE}/chat/completions", json=chat()).status_code == 307
    assert len(seen) == 1


def test_retries_through_the_gateway_share_their_request_id(gateway: ScriptedModelServer):
    gateway.enqueue(Status(code=500), Reply(text="ok"))
    with openai().OpenAI(base_url=ELSEWHERE, api_key=KEY) as client, activate(attempt(gateway, SpanRecorder())):
        client.chat.completions.create(**chat())
        client.chat.completions.create(**chat())
    first, second, other = (call.headers["x-agl-request-id"] for call in gateway.calls)
    assert first == second != other


def test_a_gateway_that_cannot_be_reached_leaves_a_record(http: Any):
    recorder = SpanRecorder()
    with ScriptedModelServer() as gone:
        mine = attempt(gone, recorder)
    with http.Client() as client, activate(mine), pytest.raises(http.ConnectError):
        client.post(f"{ELSEWHERE}/chat/completions", json=chat())
    calls = [span.call for span in recorder.drain() if span.call]
    assert [("main", 0)] == [(call.model, call.status_code) for call in calls]


def test_clients_are_patched_only_inside_a_rollout_and_restored_by_identity(gateway: ScriptedModelServer, http: Any):
    before = (http.Client.send, http.AsyncClient.send)
    with activate(attempt(gateway, SpanRecorder())):
        assert http.Client.send is not before[0]
        assert http.AsyncClient.send is not before[1]
    assert (http.Client.send, http.AsyncClient.send) == before


def test_sixteen_concurrent_async_rollouts_keep_their_identities_apart(gateway: ScriptedModelServer):
    gateway.respond_with(lambda request: Reply(text=request.last_text))
    recorder = SpanRecorder()

    async def rollout(client: Any, number: int) -> None:
        with activate(attempt(gateway, recorder, number)):
            for turn in range(4):
                answer = await client.chat.completions.create(**chat(f"{number}:{turn}"))
                assert answer.choices[0].message.content == f"{number}:{turn}"
                await asyncio.sleep(0.001 * (number % 4))

    async def run() -> None:
        async with openai().AsyncOpenAI(base_url=ELSEWHERE, api_key=KEY) as client:
            await asyncio.gather(*(rollout(client, number) for number in range(16)))

    asyncio.run(run())
    assert_attributed(gateway, 64)


def test_eight_concurrent_threads_keep_their_identities_apart(gateway: ScriptedModelServer):
    recorder = SpanRecorder()
    pool = ThreadPoolExecutor(4)  # shared by all rollouts, as a module-level pool is

    def rollout(client: Any, number: int) -> None:
        with activate(attempt(gateway, recorder, number)):
            for turn in range(2):
                client.chat.completions.create(**chat(f"{number}:{turn}"))
                pool.submit(client.chat.completions.create, **chat(f"{number}:pool")).result()
            inner = threading.Thread(target=lambda: client.chat.completions.create(**chat(f"{number}:thread")))
            inner.start()
            inner.join()

    with openai().OpenAI(base_url=ELSEWHERE, api_key=KEY) as client, pool:
        threads = [threading.Thread(target=rollout, args=(client, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_attributed(gateway, 40)


def assert_attributed(gateway: ScriptedModelServer, count: int) -> None:
    calls = gateway.calls
    assert len(calls) == count
    for call in calls:
        number = int(call.json["messages"][0]["content"].split(":")[0])
        assert f"Bearer agl_token{number:08d}.signature" == call.headers["authorization"]
        assert call.headers["x-agl-span-id"] == f"{number:016x}"


def test_direct_recording_attributes_concurrent_rollouts(gateway: ScriptedModelServer):
    def respond(request: ModelRequest) -> Reply:
        return Reply(text=request.last_text, delay=0.005 * (request.index % 3))

    gateway.respond_with(respond)
    recorders = [SpanRecorder() for _ in range(8)]

    async def rollout(client: Any, number: int) -> None:
        with activate(attempt(gateway, recorders[number], number, gateway_url="")):
            for turn in range(3):
                if turn % 2:
                    async for _ in await client.chat.completions.create(**chat(f"{number}"), stream=True):
                        pass
                else:
                    await client.chat.completions.create(**chat(f"{number}"))

    async def run() -> None:
        async with openai().AsyncOpenAI(base_url=gateway.base_url, api_key=KEY) as client:
            await asyncio.gather(*(rollout(client, number) for number in range(8)))

    asyncio.run(run())
    for number, recorder in enumerate(recorders):
        calls = [span.call for span in recorder.drain() if span.call]
        assert [str(number)] * 3 == [call.request["messages"][0]["content"] for call in calls]
