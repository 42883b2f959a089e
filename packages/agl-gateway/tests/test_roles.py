"""Calls go to the policy whose ``agents`` match their caller, whatever model name the code sends."""

import asyncio

import httpx
import openai
import pytest

from agl import operation, semconv
from agl.contracts import Upstream
from agl.tracing import ActiveAttempt, SpanRecorder, activate

MESSAGES = [{"role": "user", "content": "hi"}]
ELSEWHERE = "http://127.0.0.1:9/v1"


def upstreams_of(server):
    return [
        Upstream(name="writer", base_url=server.base_url, model="m-writer", agents="write|rewrite", is_trained=True),
        Upstream(name="critic", base_url=server.base_url, model="m-critic", agents="critic", is_trained=True),
        Upstream(name="frozen", base_url=server.base_url, model="m-frozen", aliases=("gpt-*",)),
    ]


def capture_of(it, attempt_id, token, upstreams):
    return ActiveAttempt(
        rollout_id=attempt_id.rpartition(".")[0],
        attempt_id=attempt_id,
        trace_id="1" * 32,
        root_span_id="1" * 16,
        record=SpanRecorder().record,
        token=token,
        gateway_url=it.url,
        upstreams=tuple(upstreams),
    )


async def ask(client):
    return await client.chat.completions.create(model="gpt-5", messages=MESSAGES)


async def test_an_unchanged_client_with_one_model_name_reaches_a_policy_per_role(stage, server):
    upstreams = upstreams_of(server)
    async with stage(upstreams=upstreams) as it, openai.AsyncOpenAI(base_url=ELSEWHERE, api_key="sk-own") as client:
        attempt_id, token = await it.open_attempt()
        with activate(capture_of(it, attempt_id, token, upstreams)):
            with operation("write"):
                await ask(client)
            async with operation("review", **{semconv.AGENT_NAME: "critic"}):
                await asyncio.gather(ask(client), asyncio.create_task(ask(client)))
            with operation("summarise"):
                await ask(client)
            await ask(client)
        spans = [span for span in await it.spans(attempt_id) if span.call is not None]
        assert ["writer", "critic", "critic", "frozen", "frozen"] == [span.call.policy for span in spans]
        assert [["write"], ["review", "critic"]] == [span.attributes[semconv.CALLER] for span in spans[:2]]
        assert ["m-writer", "m-critic", "m-critic", "m-frozen", "m-frozen"] == [
            call.json["model"] for call in it.server.calls
        ]
        assert not any("x-agl-who" in call.headers for call in it.server.calls)
        assert "AsyncOpenAI" in spans[0].attributes[semconv.USER_AGENT]


async def test_embeddings_go_by_their_models_name(stage, server):
    upstreams = upstreams_of(server)
    async with stage(upstreams=upstreams) as it, httpx.AsyncClient() as client:
        attempt_id, token = await it.open_attempt()
        with activate(capture_of(it, attempt_id, token, upstreams)), operation("write"):
            await client.post(f"{it.url}/v1/embeddings", json={"model": "gpt-5", "input": "hi"})
        assert ["frozen"] == [call.policy for call in await it.calls(attempt_id)]


async def test_a_call_that_two_policies_claim_is_refused_with_both_patterns(stage, server):
    upstreams = [
        Upstream(name="one", base_url=server.base_url, agents="wr.*"),
        Upstream(name="two", base_url=server.base_url, agents=".*te"),
    ]
    async with stage(upstreams=upstreams) as it:
        attempt_id, token = await it.open_attempt()
        client = openai.AsyncOpenAI(base_url=ELSEWHERE, api_key="sk-own", max_retries=0)
        words = pytest.raises(openai.ConflictError, match=r"'one' \(agents = 'wr\.\*'\) and 'two'")
        with activate(capture_of(it, attempt_id, token, upstreams)), operation("write"), words:
            await ask(client)
        await client.close()
