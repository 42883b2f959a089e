"""The route of a request that leaves a client, chosen without sending the request."""

import pytest

from agl.contracts import Upstream
from agl.dialects import Request, dialect_of
from agl.tracing import ActiveAttempt, SpanRecorder
from agl.tracing._wire.hook import Route, is_below, route_of

GATEWAY = "http://127.0.0.1:4747"
BACKEND = "http://gpu:8000/v1"
MAIN = Upstream(name="main_llm", base_url=BACKEND, model="Qwen/Qwen", aliases=("gpt-4o*",), is_trained=True)
JUDGE = Upstream(name="judge", base_url="http://other:8000/v1", model="big")


def attempt(*upstreams: Upstream, gateway_url: str = GATEWAY) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id="1" * 16,
        record=SpanRecorder().record,
        gateway_url=gateway_url,
        upstreams=upstreams,
    )


def route(mine: ActiveAttempt, url: str, model: str = "") -> Route | None:
    dialect = dialect_of(url)
    call = None if dialect is None else Request(dialect, b'{"model": "%s"}' % model.encode())
    return route_of(mine, call, url=url)


@pytest.mark.parametrize("model", ["main_llm", "Qwen/Qwen", "gpt-4o", "gpt-4o-mini"])
def test_route_redirects_a_policys_calls_by_name_model_and_alias(model: str):
    expected = Route(target="gateway", url=f"{GATEWAY}/v1/chat/completions", upstream=MAIN)
    assert expected == route(attempt(JUDGE, MAIN), "https://api.openai.com/v1/chat/completions", model)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/openai/deployments/x/chat/completions?api-version=1", "/v1/chat/completions?api-version=1"),
        ("/v1/completions", "/v1/completions"),
        ("/v1/responses", "/v1/responses"),
        ("/v1/messages", "/v1/messages"),
        ("/embeddings/", "/v1/embeddings"),
    ],
)
def test_route_keeps_the_endpoint_and_its_query(path: str, target: str):
    found = route(attempt(MAIN), f"https://api.example.com{path}", "main_llm")
    assert Route(target="gateway", url=GATEWAY + target, upstream=MAIN) == found


def test_route_redirects_calls_to_the_only_policys_own_host():
    found = route(attempt(MAIN), f"{BACKEND}/chat/completions", "anything")
    assert found is not None
    assert ("gateway", MAIN) == (found.target, found.upstream)
    two = route(attempt(MAIN, JUDGE), f"{BACKEND}/chat/completions", "anything")
    assert Route(target="record", url=f"{BACKEND}/chat/completions") == two


def test_route_leaves_other_models_where_they_go():
    url = "https://api.openai.com/v1/chat/completions"
    assert Route(target="record", url=url) == route(attempt(MAIN), url, "o3")


def test_route_without_a_gateway_records_and_asks_only_the_trained_policys_own_server_for_ids():
    own, foreign = f"{BACKEND}/chat/completions", "https://api.openai.com/v1/chat/completions"
    mine = attempt(MAIN, JUDGE, gateway_url="")
    assert Route(target="record", url=own, upstream=MAIN, wants_ids=True) == route(mine, own, "main_llm")
    assert Route(target="record", url=foreign, upstream=MAIN) == route(mine, foreign, "gpt-4o")
    judged = route(mine, "http://other:8000/v1/chat/completions", "judge")
    assert judged is not None
    assert not judged.wants_ids


def test_route_leaves_it_to_the_gateway_to_refuse_a_call_that_two_policies_may_serve():
    twins = (MAIN, Upstream(name="twin", base_url=BACKEND, model="Qwen/Qwen"))
    url = "https://api.openai.com/v1/chat/completions"
    expected = Route(target="gateway", url=f"{GATEWAY}/v1/chat/completions")
    assert expected == route(attempt(*twins), url, "Qwen/Qwen")
    assert Route(target="record", url=url) == route(attempt(*twins, gateway_url=""), url, "Qwen/Qwen")


@pytest.mark.parametrize("body", [b"", b"[1]", b"\xff\xfe", b"model=main_llm"])
def test_route_leaves_bodies_alone_that_name_no_model(body: bytes):
    url = "https://x/v1/chat/completions"
    assert route_of(attempt(MAIN), Request("chat", body), url=url) is None
    assert route_of(attempt(MAIN), None, url=url) is None


def test_route_recognises_calls_that_already_go_to_the_gateway():
    direct = f"{GATEWAY}/v1/chat/completions"
    assert Route(target="gateway", url=direct) == route(attempt(), direct, "x")
    models = f"{GATEWAY}/v1/models"
    assert Route(target="gateway", url=models) == route(attempt(), models)


def test_is_below_compares_the_whole_host():
    assert is_below("http://127.0.0.1:4747/v1", GATEWAY + "/")
    assert is_below(GATEWAY, GATEWAY)
    assert not is_below("http://127.0.0.1:47471/v1", GATEWAY)
    assert not is_below("http://127.0.0.1:4747.evil.example/v1", GATEWAY)
    assert not is_below("http://127.0.0.1:4747@evil.example/v1", GATEWAY)
    assert not is_below("http://anything/v1", "")
