"""The wire hook and the gateway send a call to the same policy, for every caller and model name."""

from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl import operation
from agl.contracts import Upstream
from agl.tracing import ActiveAttempt, SpanRecorder, activate, decode_names
from agl_gateway.relay.routing import Router
from agl_gateway.wire.problems import Problem

GATEWAY = "http://gateway.example"
HOST = "http://gpu.example/v1"
ANSWER = {"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]}
WORDS = ["writer", "critic", "gpt-4o", "gpt-4o-mini", "Qwen"]


@st.composite
def policies(draw: st.DrawFn) -> tuple[Upstream, ...]:
    def policy(name: str) -> Upstream:
        return Upstream(
            name=name,
            base_url=draw(st.sampled_from([HOST, "http://other.example/v1"])),
            model=draw(st.sampled_from(["", *WORDS])),
            aliases=draw(st.sampled_from([(), ("gpt-*",), ("gpt-4o*", "Q*"), ("*",)])),
            agents=draw(st.sampled_from(["", "", "write|critic", "wr.*"])),
        )

    return tuple(policy(name) for name in draw(st.lists(st.sampled_from(WORDS), max_size=3, unique=True)))


def send(upstreams: tuple[Upstream, ...], model: str, names: list[str], *, gateway_url: str) -> tuple[Any, list[str]]:
    """Return the request that the wire hook sends, and the policies that it has recorded."""
    sent: list[Any] = []
    recorder = SpanRecorder()

    def answer(request: Any) -> Any:
        sent.append(request)
        return httpx.Response(200, json=ANSWER)

    attempt = ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="1" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        upstreams=upstreams,
        gateway_url=gateway_url,
    )
    with httpx.Client(transport=httpx.MockTransport(answer)) as client, activate(attempt), ExitStack() as stack:
        for name in names:
            stack.enter_context(operation(name))
        client.post(f"{HOST}/chat/completions", json={"model": model, "messages": []})
    return sent[0], [span.call.policy for span in recorder.drain() if span.call is not None]


def chosen(upstreams: tuple[Upstream, ...], model: str, names: tuple[str, ...] = ()) -> str | int:
    """Return the policy that the gateway chooses, or the status with which it refuses the call."""
    try:
        return Router(upstreams, environ={}).choose(model, names=names).upstream.name
    except Problem as problem:
        return problem.status


@settings(max_examples=300)
@given(policies(), st.sampled_from(["o3", *WORDS]), st.lists(st.sampled_from(["write", "critic", "plan"]), max_size=2))
def test_hook_and_gateway_agree(upstreams: tuple[Upstream, ...], model: str, names: list[str]):
    sent, _ = send(upstreams, model, names, gateway_url=GATEWAY)
    _, recorded = send(upstreams, model, names, gateway_url="")
    is_redirected = str(sent.url).startswith(GATEWAY)
    told = decode_names(sent.headers.get("x-agl-who", ""))
    if is_redirected:
        assert 404 != chosen(upstreams, model, told), "the gateway serves what the hook sends it"
    if not told:
        expected = chosen(upstreams, model) if is_redirected else ""
        assert [expected if isinstance(expected, str) else ""] == recorded


def test_a_policy_of_the_models_name_gets_the_call_from_hook_and_gateway_alike():
    upstreams = (
        Upstream(name="writer", base_url=HOST, aliases=("gpt-*",)),
        Upstream(name="gpt-4o", base_url=HOST),
    )
    for order in (upstreams, upstreams[::-1]):
        assert ["gpt-4o"] == send(order, "gpt-4o", [], gateway_url="")[1]
        assert "gpt-4o" == chosen(order, "gpt-4o")
        assert "writer" == chosen(order, "gpt-5")


async def test_a_model_that_two_policies_serve_is_refused_with_both_names(stage, server):
    upstreams = [Upstream(name=name, base_url=server.base_url, model="Qwen") for name in ("two", "one")]
    async with stage(upstreams=upstreams) as it:
        attempt_id, token = await it.open_attempt()
        client = it.openai(token)
        with pytest.raises(openai.ConflictError, match="'one' and 'two' both serve the model 'Qwen'"):
            await client.chat.completions.create(model="Qwen", messages=[])
        answer = await client.chat.completions.create(model="two", messages=[])
        assert answer.choices
        assert ["", "two"] == [call.policy for call in await it.calls(attempt_id)]
        await client.close()
