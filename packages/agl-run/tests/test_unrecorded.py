"""Only model calls through clients that are not recorded are counted, with the client's name."""

import asyncio
import http.client
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
import botocore.session
import httpx
import openai
import pytest
import requests
import urllib3
from botocore.config import Config

from agl import Span, operation
from agl.contracts import Upstream
from agl.episodes import find_disagreement
from agl.tracing import ActiveAttempt, SpanRecorder, activate, open_span
from agl_run.tracers.unrecorded import UnrecordedCalls
from agl_testing.conformance import TracerConformance, TracerScenario
from agl_testing.model_server import Reply, ScriptedModelServer, Status

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODY = json.dumps(CHAT).encode()
KEY = {"authorization": "Bearer sk-secret", "content-type": "application/json"}
PATCHED = (
    (http.client.HTTPConnection, "putrequest"),
    (http.client.HTTPConnection, "getresponse"),
    (aiohttp.ClientSession, "_request"),
)


def by_urllib(url: str, timeout: float = 10) -> None:
    with urlopen(Request(url, data=BODY, headers=KEY), timeout=timeout) as answer:
        answer.read()


def by_http_client(url: str) -> None:
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request("POST", f"/{path}", BODY, KEY)
    connection.getresponse().read()
    connection.close()


def by_requests(url: str) -> None:
    requests.post(url, json=CHAT, headers=KEY, timeout=10)


def by_urllib3(url: str) -> None:
    with urllib3.PoolManager() as pool:
        pool.request("POST", url, json=CHAT, headers=KEY)


def by_aiohttp(url: str) -> None:
    asyncio.run(over_aiohttp(url))


async def over_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(url, json=CHAT, headers=KEY) as answer:
        await answer.read()


def by_httpx(url: str) -> None:
    httpx.post(url, json=CHAT, headers=KEY)


CLIENTS: dict[str, Callable[[str], None]] = {
    "urllib": by_urllib,
    "http.client": by_http_client,
    "requests": by_requests,
    "urllib3": by_urllib3,
    "aiohttp": by_aiohttp,
}


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(respond=lambda _: Reply(text="well")) as server:
        yield server


@pytest.fixture
def chat(server: ScriptedModelServer) -> str:
    return f"{server.base_url}/chat/completions"


@pytest.fixture
def echo() -> Iterator[str]:
    """Start a server that answers every request with 200."""

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST  # noqa: N815  # the server's name for it

        def do_CONNECT(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.close_connection = False  # the tunnelled request follows on it

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def tracer() -> Iterator[UnrecordedCalls]:
    tracer = UnrecordedCalls()
    tracer.install()
    yield tracer
    tracer.uninstall()


pytestmark = pytest.mark.usefixtures("tracer")


def attempt_of(recorder: SpanRecorder, **fields: Any) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        **fields,
    )


def spans_of(agent: Callable[[], object], **fields: Any) -> list[Span]:
    recorder = SpanRecorder()
    with activate(attempt_of(recorder, **fields)):
        agent()
    return recorder.drain()


def unseen(spans: list[Span]) -> list[str]:
    return [call.client for call in find_disagreement(spans, attempt_id="ro-1.1").unseen]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_model_call_is_counted_once_with_the_clients_name(client: str, chat: str):
    spans = spans_of(lambda: CLIENTS[client](chat))
    assert [f"{client} to 127.0.0.1"] == unseen(spans)
    assert 1 == len(spans)
    assert "secret" not in str(spans)
    assert "messages" not in str(spans)


def test_a_call_of_botocore_to_bedrock_is_counted(echo: str):
    client = botocore.session.get_session().create_client(
        "bedrock-runtime",
        region_name="eu-west-1",
        endpoint_url=echo,
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=Config(retries={"max_attempts": 0}),
    )
    asked = [{"role": "user", "content": [{"text": "hi"}]}]
    spans = spans_of(lambda: client.converse(modelId="eu.claude:0", messages=asked))
    assert ["botocore to 127.0.0.1"] == unseen(spans)


def test_calls_of_a_mixed_agent_are_counted_or_recorded_and_none_is_unattributed(
    server: ScriptedModelServer, chat: str
):
    def mixed() -> None:
        with openai.OpenAI(base_url=server.base_url, api_key="k") as client:
            for _ in range(3):
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
                by_requests(chat)

    spans = spans_of(mixed, upstreams=(Upstream(name="main", base_url=server.base_url, model="m"),))
    found = find_disagreement(spans, attempt_id="ro-1.1")
    assert (3, 3, 0) == (
        sum(span.call is not None for span in spans),
        len(found.unseen),
        len(found.unattributed),
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_a_call_to_the_runs_own_gateway_is_not_counted(client: str, chat: str):
    root = chat.removesuffix("/v1/chat/completions")
    assert [] == spans_of(lambda: CLIENTS[client](chat), gateway_url=root)
    assert [f"{client} to 127.0.0.1"] == unseen(spans_of(lambda: CLIENTS[client](chat), gateway_url=f"{root}1"))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_call_outside_of_every_rollout_is_not_counted_while_one_runs(client: str, chat: str):
    recorder = SpanRecorder()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(print).result()  # the worker's thread starts outside of the rollout
        with activate(attempt_of(recorder)):
            outside = Context().run(pool.submit, CLIENTS[client], chat)
            outside.result()
    assert [] == recorder.drain()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/models",
        "/api/v10/channels/7/messages",
        "/v3/mail.example/messages",
        "/forms/7/responses",
        "/v1/chat/completions/7/cancel",
    ],
)
@pytest.mark.parametrize("client", ["urllib", "aiohttp"])
def test_a_request_that_is_no_model_call_is_not_counted(client: str, path: str, chat: str, echo: str):
    assert [] == spans_of(lambda: CLIENTS[client](f"{echo}{path}"))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions?api-version=1",
        "/openai/deployments/x/completions",
        "/openai/responses",
        "/v1/responses/",
        "/v1/messages",
        "/v2/chat",
        "/api/chat",
        "/api/generate",
        "/v1beta/models/gemini-9:streamGenerateContent?alt=sse",
        "/v1/projects/p/models/claude:rawPredict",
        "/model/eu.claude%3A0/converse-stream",
        "/model/x/invoke-with-response-stream",
    ],
)
@pytest.mark.parametrize("client", ["urllib", "aiohttp"])
def test_routes_of_many_providers_are_known(client: str, path: str, echo: str):
    assert [f"{client} to 127.0.0.1"] == unseen(spans_of(lambda: CLIENTS[client](f"{echo}{path}")))


def test_the_host_behind_a_proxy_is_named_and_compared_with_the_gateway(echo: str):
    def through_a_proxy() -> None:
        requests.post("http://models.example/v1/chat/completions", proxies={"http": echo}, timeout=10)
        connection = http.client.HTTPConnection(echo.removeprefix("http://"), timeout=10)
        connection.set_tunnel("tunnel.example", 80)
        connection.request("POST", "/v1/chat/completions", BODY, KEY)
        connection.getresponse().read()
        connection.close()

    assert ["requests to models.example", "http.client to tunnel.example"] == unseen(spans_of(through_a_proxy))
    assert 2 == len(spans_of(through_a_proxy, gateway_url=echo))
    left = unseen(spans_of(through_a_proxy, gateway_url="http://Tunnel.example"))
    assert ["requests to models.example"] == left


def test_a_get_is_no_model_call(echo: str):
    def agent() -> None:
        requests.get(f"{echo}/v1/chat/completions", timeout=10)
        urlopen(f"{echo}/v1/chat/completions", timeout=10).close()

    assert [] == spans_of(agent)


def test_failed_calls_are_not_counted_and_the_retry_is(server: ScriptedModelServer, chat: str):
    def retried() -> None:
        with pytest.raises(HTTPError):
            by_urllib(chat)
        by_aiohttp(chat)
        by_urllib(chat)
        with pytest.raises(requests.ConnectionError):
            by_requests("http://127.0.0.1:1/v1/chat/completions")

    answers = iter([Status(code=500), Status(code=500), Reply(text="well")])
    server.respond_with(lambda _: next(answers))
    assert ["urllib to 127.0.0.1"] == unseen(spans_of(retried))


def test_a_call_within_a_frameworks_own_span_of_it_is_counted_once(chat: str):
    def framework() -> None:
        with open_span(model="m", client="pigeon.ChatPigeon", server=chat):
            by_requests(chat)

    def stand_in() -> None:
        with open_span(model="m", client="pigeon.ChatPigeon", unless_called=True):
            by_requests(chat)

    assert ["pigeon.ChatPigeon to 127.0.0.1"] == unseen(spans_of(framework))
    assert ["requests to 127.0.0.1"] == unseen(spans_of(stand_in))


def test_a_counted_call_is_attributed_to_the_agent_that_made_it(chat: str):
    def agent() -> None:
        with operation("write", **{"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}):
            by_requests(chat)

    (call,) = find_disagreement(spans_of(agent), attempt_id="ro-1.1").unseen
    assert "writer" == call.agent


def test_a_client_over_httpx_with_aiohttp_below_it_is_not_counted(chat: str):
    class OverAiohttp(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await over_aiohttp(str(request.url))
            return httpx.Response(200, json={"choices": [{"index": 0, "message": {"content": "hi"}}]})

    async def agent() -> None:
        async with httpx.AsyncClient(transport=OverAiohttp()) as client:
            await client.post(chat, json=CHAT)

    spans = spans_of(lambda: asyncio.run(agent()))
    assert ([], 1) == (unseen(spans), sum(span.call is not None for span in spans))


@pytest.mark.parametrize("client", ["requests", "aiohttp"])
def test_attempts_in_threads_at_once_are_charged_with_their_own_calls(client: str, chat: str):
    def play(number: int) -> int:
        with ThreadPoolExecutor(2) as pool:
            return len(spans_of(lambda: list(pool.map(CLIENTS[client], [chat] * number))))

    with ThreadPoolExecutor(4) as pool:
        assert [1, 2, 3, 4] == list(pool.map(play, [1, 2, 3, 4]))


def test_attempts_in_tasks_at_once_are_charged_with_their_own_calls(chat: str):
    async def play(number: int) -> int:
        recorder = SpanRecorder()
        with activate(attempt_of(recorder)):
            await asyncio.gather(*(over_aiohttp(chat) for _ in range(number)))
            await asyncio.to_thread(by_requests, chat)
        return len(recorder.drain())

    async def play_all() -> list[int]:
        return await asyncio.gather(*map(play, range(4)))

    assert [1, 2, 3, 4] == asyncio.run(play_all())


def test_several_installed_tracers_count_once_and_the_last_one_restores(chat: str, tracer: UnrecordedCalls):
    other = UnrecordedCalls()
    other.install()
    assert 1 == len(spans_of(lambda: by_aiohttp(chat)))
    other.uninstall()
    assert 1 == len(spans_of(lambda: by_aiohttp(chat)))
    watched = [inspect.getattr_static(owner, name) for owner, name in PATCHED]
    tracer.uninstall()
    restored = [inspect.getattr_static(owner, name) for owner, name in PATCHED]
    assert not any(a is b for a, b in zip(watched, restored, strict=True))
    assert not any(hasattr(method, "__wrapped__") for method in restored)


@pytest.mark.long
def test_a_client_that_is_imported_later_is_watched_and_none_is_imported_for_it(chat: str):
    script = f"""
import sys
from agl.tracing import ActiveAttempt, activate
from agl_run.tracers.unrecorded import UnrecordedCalls

spans = []
attempt = ActiveAttempt(rollout_id="r", attempt_id="a", trace_id="a" * 32, root_span_id="1" * 16, record=spans.append)
tracer = UnrecordedCalls()
tracer.install()
assert not {{"aiohttp", "requests", "urllib3"}} & set(sys.modules)
with activate(attempt):
    import asyncio
    import aiohttp

    async def call():
        async with aiohttp.ClientSession() as session, session.post({chat!r}, json={{}}) as answer:
            await answer.read()

    asyncio.run(call())
assert ["aiohttp"] == [span.attributes["agl.client"] for span in spans]
tracer.uninstall()
assert not hasattr(aiohttp.ClientSession._request, "__wrapped__")
assert not any("ImportWatch" in type(finder).__name__ for finder in sys.meta_path)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (0, "") == (done.returncode, done.stderr)


class TestUnrecordedCalls(TracerConformance):
    has_current_span = False
    records_errors = False

    @pytest.fixture
    def scenario(self, chat: str, tracer: UnrecordedCalls) -> TracerScenario:
        tracer.uninstall()

        def run(probe: Callable[[], None]) -> None:
            by_requests(chat)
            probe()

        def fail(error: Exception) -> None:
            by_requests(chat)
            raise error

        return TracerScenario(tracer=UnrecordedCalls(), run=run, fail=fail, patched=PATCHED)
