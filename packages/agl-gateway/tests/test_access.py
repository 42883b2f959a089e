"""Permissions: tokens, routing, and secrets that never reach the store or a log."""

import gzip
import logging
import time
from functools import partial

import aiohttp
import anthropic
import openai
import pytest

from agl.contracts import Upstream
from agl.errors import ConfigError, NotFoundError, TokenError
from agl.schemas import ModelCall, Outcome, Reward, Span, new_span_id
from agl_gateway.client import HttpStore
from agl_gateway.embedded import EmbeddedGateway
from agl_run.access.tokens import AttemptTokens
from agl_testing.model_server import Status
from agl_testing.waiting import eventually

SECRET = b"a secret of the gateway's own tests"
MESSAGES = [{"role": "user", "content": "hi"}]


async def ask(client, model="main_llm"):
    return await client.chat.completions.create(model=model, messages=MESSAGES)


async def answers_nothing(client) -> bool:
    await ask(client)
    return False


async def test_forged_expired_and_missing_tokens_are_refused_in_the_dialects_format(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        rollout_id = attempt_id.rpartition(".")[0]
        forged = AttemptTokens(b"another secret altogether").issue(rollout_id, attempt_id, expires_at=time.time() + 9)
        expired = it.tokens.issue(rollout_id, attempt_id, expires_at=time.time() - 9)
        for bad in (forged, expired, "sk-what", token[:-2] + "xx"):
            async with it.openai(bad) as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await ask(client)
                assert bad not in str(refused.value)
            async with anthropic.AsyncAnthropic(base_url=it.url, api_key=bad, max_retries=0) as client:
                with pytest.raises(anthropic.AuthenticationError):
                    await client.messages.create(model="main_llm", max_tokens=5, messages=MESSAGES)
        assert [] == it.server.calls
        assert [] == await it.calls(attempt_id)


async def test_path_form_identifies_the_attempt_and_refuses_another_ones_token(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        other_id, other = await it.open_attempt()
        rollout_id = attempt_id.rpartition(".")[0]
        base = f"{it.url}/rollout/{rollout_id}/attempt/{attempt_id}/key/{token}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="anything", max_retries=0) as client:
            await ask(client)
        async with openai.AsyncOpenAI(base_url=base.replace(token, other), api_key="x", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="belongs to another one"):
                await ask(client)
        assert 1 == len(await it.calls(attempt_id))
        assert [] == await it.calls(other_id)


async def test_token_of_an_ended_attempt_makes_no_more_calls(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            await ask(client)
            await it.store.finish([Outcome(attempt_id=attempt_id, status="succeeded")])
            with pytest.raises(openai.ConflictError, match="has ended"):
                await eventually(partial(answers_nothing, client))  # noticed within moments
        unknown = it.tokens.issue("ro-none", "ro-none.1", expires_at=time.time() + 60)
        async with it.openai(unknown) as client:
            with pytest.raises(openai.AuthenticationError, match="does not know attempt"):
                await ask(client)


async def test_admin_token_makes_no_model_calls(stage):
    async with stage() as it, it.openai(it.tokens.issue("", "", scope="admin", expires_at=time.time() + 60)) as client:
        with pytest.raises(openai.AuthenticationError, match="admin token"):
            await ask(client)


async def test_models_are_routed_by_name_model_and_alias_and_unknown_ones_list_the_known(stage, server):
    upstreams = [
        Upstream(name="one", base_url=server.base_url, model="m-one", is_trained=True),
        Upstream(name="two", base_url=server.base_url, model="m-two", aliases=("gpt-*",)),
    ]
    async with stage(upstreams=upstreams) as it:
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            for model in ("one", "m-two", "gpt-4o"):
                await ask(client, model)
            with pytest.raises(openai.NotFoundError, match=r"'one', 'm-one', 'two', 'm-two', 'gpt-\*'"):
                await ask(client, "nope")
            listed = await client.models.list()
        assert ["one", "m-one", "two", "m-two", "gpt-*"] == [model.id for model in listed.data]
        assert ["m-one", "m-two", "m-two"] == [call.json["model"] for call in it.server.calls]
        assert [True, None, None] == [call.json.get("return_token_ids") for call in it.server.calls]
        calls = await it.calls(attempt_id)
        assert ["one", "two", "two", ""] == [call.policy for call in calls]
        assert "not asked for" in calls[1].ids_missing
        assert 404 == calls[3].status_code


async def test_provider_keys_and_tokens_never_reach_the_store_a_log_or_the_wrong_side(
    stage, server, monkeypatch, caplog
):
    key = "sk-provider-0123456789abcdef"
    monkeypatch.setenv("PROVIDER_KEY", key)
    caplog.set_level(logging.DEBUG)
    upstreams = [Upstream(name="main_llm", base_url=server.base_url, api_key_env="PROVIDER_KEY", is_trained=True)]
    async with stage(upstreams=upstreams) as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Status(code=401, message=f"Incorrect API key provided: {key}"))
        async with it.openai(token) as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client)
            tools = [{"type": "mcp", "server_url": "http://x", "headers": {"Authorization": "Bearer tool-secret-1"}}]
            await client.responses.create(model="main_llm", input="hi", tools=tools)
        assert f"Bearer {key}" == it.server.calls[0].headers["authorization"]
        assert token not in str([call.headers for call in it.server.calls])
        written = repr(await it.spans(attempt_id))
        for secret in (key, token, "tool-secret-1"):
            assert secret not in written
            assert secret not in caplog.text


async def test_missing_provider_key_is_refused_before_anything_runs(server):
    gateway = EmbeddedGateway()
    one = Upstream(name="main_llm", base_url=server.base_url, api_key_env="NO_SUCH_VARIABLE")
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        await gateway.start(store=None, upstreams=[one], secret=SECRET)  # type: ignore[arg-type]
    await gateway.stop()


async def test_port_in_use_is_an_error_that_says_what_to_do(stage):
    async with stage() as it:
        second = EmbeddedGateway(port=int(it.url.rpartition(":")[2]))
        with pytest.raises(ConfigError, match="--port"):
            await second.start(store=it.store, upstreams=[], secret=SECRET)


async def test_attempt_token_may_append_to_its_own_attempt_and_nothing_else(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        other_id, _ = await it.open_attempt()
        rollout_id = attempt_id.rpartition(".")[0]
        agent = HttpStore(it.url, token=token)
        reward = Reward(value=1.0, source="evaluator")
        forged = ModelCall(request_id="r", dialect="chat", model="m", policy="main_llm")
        own = Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="x", reward=reward)
        await agent.append_spans([own])
        await agent.append_spans(
            [Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="y", call=forged)]
        )
        foreign = Span(
            rollout_id=other_id.rpartition(".")[0], attempt_id=other_id, span_id=new_span_id(), name="x", reward=reward
        )
        with pytest.raises(TokenError, match="own attempt"):
            await agent.append_spans([foreign])
        for forbidden in (
            agent.attempts(rollout_id),
            agent.spans(rollout_id),
            agent.claim(worker="agent"),
            agent.cancel([rollout_id]),
            agent.resources(),
            agent.delete([rollout_id]),
        ):
            with pytest.raises(TokenError, match="admin token"):
                await forbidden
        await agent.close()
        rewarded, called = await it.spans(attempt_id)
        assert "agent" == rewarded.reward.source
        assert "" == called.call.policy
        assert [] == await it.spans(other_id)


async def test_store_api_takes_json_and_names_unknown_ids(stage):
    async with stage() as it:
        admin = it.tokens.issue("", "", scope="admin", expires_at=time.time() + 60)
        headers = {"authorization": f"Bearer {admin}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{it.url}/store/attempts", json={"rollout_id": "ro-x"}) as reply:
                assert (404, "ro-x") == (reply.status, (await reply.json())["key"])
            rollout = {"rollout_id": "ro-json", "task": {"q": 1}}
            async with session.post(f"{it.url}/store/enqueue", json={"rollouts": [rollout]}) as reply:
                assert "ro-json" == (await reply.json())[0]["rollout_id"]
            async with session.post(f"{it.url}/store/nothing", json={}) as reply:
                assert 404 == reply.status
                assert "enqueue" in (await reply.json())["message"]
            async with session.post(f"{it.url}/store/attempts", json={"rollout_id": 3}) as reply:
                assert 400 == reply.status
            async with session.get(f"{it.url}/openapi.json") as reply:
                document = await reply.json()
            async with session.get(f"{it.url}/metrics") as reply:
                assert "agl_rollouts_queued" in await reply.text()
            async with session.get(f"{it.url}/nowhere") as reply:
                assert 404 == reply.status
        assert "3.1.0" == document["openapi"]
        assert "/store/append_spans" in document["paths"]
        assert "Rollout" in document["components"]["schemas"]
        store = HttpStore(it.url, token=admin)
        with pytest.raises(NotFoundError, match="ro-y"):
            await store.attempts("ro-y")
        await store.close()


async def test_bodies_that_are_too_large_are_refused_even_when_compressed(stage):
    async with stage() as it:
        _, token = await it.open_attempt()
        bomb = gzip.compress(b"0" * (80 * 1024 * 1024))
        headers = {"x-api-key": token, "content-encoding": "gzip", "content-type": "application/x-protobuf"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{it.url}/v1/traces", data=bomb, headers=headers) as reply,
        ):
            assert 413 == reply.status
