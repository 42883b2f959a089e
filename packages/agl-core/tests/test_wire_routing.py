"""Where a request goes, decided without sending it."""

import pytest

from agl.contracts import Upstream
from agl.schemas import Dialect
from agl.tracing import Capture, SpanRecorder
from agl.tracing._wire.routing import Route, is_below, route_of

GATEWAY = "http://127.0.0.1:4747"
BACKEND = "http://gpu:8000/v1"
MAIN = Upstream(name="main_llm", base_url=BACKEND, model="Qwen/Qwen", aliases=("gpt-4o*",), is_trained=True)
JUDGE = Upstream(name="judge", base_url="http://other:8000/v1", model="big")


def capture(*upstreams: Upstream, gateway_url: str = GATEWAY) -> Capture:
    return Capture(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id="1" * 16,
        record=SpanRecorder().record,
        gateway_url=gateway_url,
        upstreams=upstreams,
    )


def route(mine: Capture, url: str, model: str = "", method: str = "POST") -> Route | None:
    return route_of(mine, method=method, url=url, body=b'{"model": "%s"}' % model.encode())


@pytest.mark.parametrize("model", ["main_llm", "Qwen/Qwen", "gpt-4o", "gpt-4o-mini"])
def test_route_redirects_a_policys_calls_by_name_model_and_alias(model: str):
    expected = Route(target="gateway", url=f"{GATEWAY}/v1/chat/completions", dialect="chat", upstream=MAIN)
    assert expected == route(capture(JUDGE, MAIN), "https://api.openai.com/v1/chat/completions", model)


@pytest.mark.parametrize(
    ("path", "dialect", "target"),
    [
        ("/openai/deployments/x/chat/completions?api-version=1", "chat", "/v1/chat/completions?api-version=1"),
        ("/v1/completions", "completions", "/v1/completions"),
        ("/v1/responses", "responses", "/v1/responses"),
        ("/v1/messages", "messages", "/v1/messages"),
        ("/embeddings/", "embeddings", "/v1/embeddings"),
    ],
)
def test_route_keeps_the_endpoint_and_its_query(path: str, dialect: Dialect, target: str):
    found = route(capture(MAIN), f"https://api.example.com{path}", "main_llm")
    assert Route(target="gateway", url=GATEWAY + target, dialect=dialect, upstream=MAIN) == found


def test_route_redirects_calls_to_the_only_policys_own_host():
    found = route(capture(MAIN), f"{BACKEND}/chat/completions", "anything")
    assert found is not None
    assert ("gateway", MAIN) == (found.target, found.upstream)
    two = route(capture(MAIN, JUDGE), f"{BACKEND}/chat/completions", "anything")
    assert Route(target="record", url=f"{BACKEND}/chat/completions", dialect="chat") == two


def test_route_leaves_other_models_where_they_go():
    url = "https://api.openai.com/v1/chat/completions"
    assert Route(target="record", url=url, dialect="chat") == route(capture(MAIN), url, "o3")


def test_route_without_a_gateway_records_and_asks_only_the_trained_policys_own_server_for_ids():
    own, foreign = f"{BACKEND}/chat/completions", "https://api.openai.com/v1/chat/completions"
    mine = capture(MAIN, JUDGE, gateway_url="")
    assert Route(target="record", url=own, dialect="chat", upstream=MAIN, wants_ids=True) == route(
        mine, own, "main_llm"
    )
    assert Route(target="record", url=foreign, dialect="chat", upstream=MAIN) == route(mine, foreign, "gpt-4o")
    judged = route(mine, "http://other:8000/v1/chat/completions", "judge")
    assert judged is not None
    assert not judged.wants_ids


@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("GET", "https://api.openai.com/v1/chat/completions"),
        ("POST", "https://api.openai.com/v1/files"),
        ("POST", "https://example.com/search?next=/chat/completions"),
        ("POST", "https://api.anthropic.com/v1/messages/count_tokens"),
    ],
)
def test_route_leaves_other_requests_alone(method: str, url: str):
    assert route(capture(MAIN), url, "main_llm", method) is None


@pytest.mark.parametrize("body", [None, b"", b"[1]", b"\xff\xfe", b"model=main_llm"])
def test_route_leaves_bodies_alone_that_name_no_model(body: bytes | None):
    assert route_of(capture(MAIN), method="POST", url="https://x/v1/chat/completions", body=body) is None


def test_route_recognises_calls_that_already_go_to_the_gateway():
    direct = f"{GATEWAY}/v1/chat/completions"
    assert Route(target="gateway", url=direct, dialect="chat") == route(capture(), direct, "x")
    models = f"{GATEWAY}/v1/models"
    assert Route(target="gateway", url=models, dialect=None) == route(capture(), models, method="GET")


def test_is_below_compares_the_whole_host():
    assert is_below("http://127.0.0.1:4747/v1", GATEWAY + "/")
    assert is_below(GATEWAY, GATEWAY)
    assert not is_below("http://127.0.0.1:47471/v1", GATEWAY)
    assert not is_below("http://127.0.0.1:4747.evil.example/v1", GATEWAY)
    assert not is_below("http://127.0.0.1:4747@evil.example/v1", GATEWAY)
    assert not is_below("http://anything/v1", "")
