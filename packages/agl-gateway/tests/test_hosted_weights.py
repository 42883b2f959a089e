"""Gateways send the calls of conversations to the version of a policy's weights that a host serves under its name."""

import asyncio

import openai
import pytest

from agl.contracts import Upstream
from agl_gateway.traffic.arms import FRESH_S
from agl_inspect.records.splits import HOSTED, VARIANTS, HostedVersions, Variant
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer

from .test_served_split import CANARY, NEW, OLD, Served, arm_and_text, record_of, switch
from .test_split import CLIENT, WEIGHTS, prompts, publish, serve


def respond(request: ModelRequest) -> Reply:
    """Answer with the name of the model that was asked for."""
    return Reply(text=str(request.body["model"]))


@pytest.fixture
def host():
    with ScriptedModelServer(respond=respond) as running:
        yield running


def upstreams(host: ScriptedModelServer) -> list[Upstream]:
    return [Upstream(name="main_llm", base_url=host.base_url)]


async def hosts(gateway: Served, *versions: str) -> None:
    """Record that the host serves these versions."""
    models = {version: f"main_llm@{version}" for version in versions}
    await HOSTED.add(gateway.store, {"main_llm": HostedVersions(models=models)})


async def test_arms_get_their_own_weights_from_one_host_and_calls_are_recorded_under_them(tmp_path, host):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2"), labelled=("unrelated",))
    async with serve(tmp_path, None, upstreams(host)) as gateway:
        await hosts(gateway, "w1", "w2")
        await switch(gateway.store, CANARY)
        seen = {await arm_and_text(gateway, f"c{number}") for number in range(12)}
        assert {("production", "main_llm@w1"), ("candidate", "main_llm@w2")} == seen
        _, headers = await gateway.ask(CLIENT, conversation="c0")
        rollout = await record_of(gateway.store, headers)
        calls = [span.call for span in await gateway.store.spans(rollout.rollout_id) if span.call is not None]
        assert [("main_llm", rollout.resources["main_llm"])] * 2 == [(c.policy, c.model_version) for c in calls]


async def test_conversation_of_an_arm_that_ended_goes_on_with_the_usual_weights(tmp_path, host):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2"), labelled=("unrelated",))
    async with serve(tmp_path, None, upstreams(host)) as gateway:
        await hosts(gateway, "w1", "w2")
        await switch(gateway.store, {"production": NEW})
        assert ("production", "main_llm@w2") == await arm_and_text(gateway, "begun")
        await switch(gateway.store, {"production": OLD})
        await hosts(gateway, "w1")
        await asyncio.sleep(FRESH_S)
        text, headers = await gateway.ask(CLIENT, conversation="begun")
        assert "main_llm@w1" == text
        rollout = await record_of(gateway.store, headers)
        calls = [span.call for span in await gateway.store.spans(rollout.rollout_id) if span.call is not None]
        assert ["w2", "w1"] == [call.model_version for call in calls]


async def test_call_of_a_served_arm_without_its_weights_ends_with_an_error(tmp_path, host):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2"), labelled=("unrelated",))
    async with serve(tmp_path, None, upstreams(host)) as gateway:
        await hosts(gateway, "w1")
        await switch(gateway.store, {"production": NEW})
        with pytest.raises(openai.InternalServerError, match=r"no upstream serves main_llm@w2.*agl learn host"):
            await gateway.ask(CLIENT, conversation="early")
        await hosts(gateway, "w1", "w2")
        assert ("production", "main_llm@w2") == await arm_and_text(gateway, "early")
        await hosts(gateway)
        await asyncio.sleep(FRESH_S)
        for conversation in ("early", "later"):
            with pytest.raises(openai.InternalServerError, match="no upstream serves main_llm@w2"):
                await gateway.ask(CLIENT, conversation=conversation)


async def test_base_weights_never_answer_while_a_host_loads_those_that_all_arms_share(tmp_path, host):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2"), labelled=("unrelated",))
    canary = {"production": OLD, "candidate": {**OLD, "prompt": "v2"}}
    async with serve(tmp_path, None, upstreams(host)) as gateway:
        await hosts(gateway)
        await switch(gateway.store, canary)
        for user in ("ann", "bob"):
            with pytest.raises(openai.InternalServerError, match="no upstream serves main_llm@w1"):
                await gateway.ask(CLIENT, conversation=user)
        await switch(gateway.store, {"production": OLD})
        await hosts(gateway, "w1")
        assert "main_llm@w1" == (await gateway.ask(CLIENT, conversation="ann"))[0]
        assert "main_llm@w1" == (await gateway.ask(CLIENT, conversation="later"))[0]


async def test_variant_that_the_host_does_not_serve_gets_the_shared_weights_with_a_warning(tmp_path, host, caplog):
    await publish(tmp_path, *WEIGHTS)
    ann = {"x-agl-user-id": "ann"}
    async with serve(tmp_path, None, upstreams(host)) as gateway:
        await hosts(gateway, "w1")
        await switch(gateway.store, {"production": {"main_llm": "w1"}})
        await VARIANTS.add(gateway.store, {"user:ann": Variant(versions={"main_llm": "w2"})})
        for name in ("c1", "c2"):
            assert ("user:ann", "main_llm@w1") == await arm_and_text(gateway, name, **ann)
        await hosts(gateway)
        await asyncio.sleep(FRESH_S)
        with pytest.raises(openai.InternalServerError, match="no upstream serves main_llm@w1"):
            await gateway.ask(CLIENT, conversation="c3", extra=ann)
    assert 1 == len([each for each in caplog.messages if "no upstream serves main_llm@w2" in each])
