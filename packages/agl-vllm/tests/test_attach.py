"""The policy with servers that already run, and the calls of a run that uses them."""

import asyncio
import time
from contextlib import asynccontextmanager

import openai
import pytest
from aiohttp import web

from agl.contracts import Upstream
from agl.errors import PolicyError
from agl.schemas import Rollout, unpack_floats, unpack_ids
from agl.stores import MemoryStore
from agl_gateway.embedded import EmbeddedGateway
from agl_run.access.tokens import AttemptTokens
from agl_vllm.policy import VLLMPolicy

from .conftest import noted, published, started

SECRET = b"a secret of these tests"


def attached(base, urls, **settings):
    return VLLMPolicy(name="main_llm", model=base.uri, base_url=urls, probe_tolerance=1e-6, **settings)


@asynccontextmanager
async def serving(base, **settings):
    """Start servers, and yield their base URLs."""
    owner = started(base, **settings)
    try:
        yield list((await owner.start()).base_urls)
    finally:
        await owner.stop()


async def test_attaching_finds_the_model_and_reloads_by_default(base, make_weights):
    async with serving(base, replicas=2) as urls:
        policy = attached(base, urls)
        served = await policy.start()
        assert (tuple(urls), "main_llm") == (served.base_urls, served.model)
        await policy.load(published(make_weights("new", shift=0.5)))
        await policy.stop()
        for url in urls:
            assert "/collective_rpc" in noted(url)["paths"]
        assert urls[0].startswith("http://127.0.0.1:")


async def test_a_server_of_another_model_or_none_at_all_is_refused(base):
    async with serving(base) as urls:
        with pytest.raises(PolicyError, match=r"serves \['main_llm'\] and not 'other'"):
            await attached(base, urls, served_model="other").start()
    with pytest.raises(PolicyError, match=r"did not answer http://127.0.0.1:9/v1/models .*is it running"):
        await attached(base, "http://127.0.0.1:9/v1").start()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("text/html", "<html>"),
        ("application/json", "{"),
        ("application/json", "[]"),
        ("application/json", '{"data": []}'),
    ],
)
async def test_a_server_that_lists_no_models_is_refused(base, kind, text):
    async def answer(_request):
        return web.Response(text=text, content_type=kind)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        with pytest.raises(PolicyError, match=r"/v1/models .*is base_url that of a vLLM server"):
            await attached(base, url).start()
    finally:
        await runner.cleanup()


async def test_a_server_whose_logprobs_leave_the_temperature_out_is_refused(base, fake):
    fake("raw-logprobs")

    with pytest.raises(PolicyError, match=r"at temperature 1 whatever.*--logprobs-mode processed_logprobs"):
        async with serving(base):
            pass


@pytest.mark.parametrize("own", ["own-temperature", "own-top-p"])
async def test_a_server_that_samples_by_the_models_own_parameters_is_refused(base, fake, own):
    fake(own)

    with pytest.raises(PolicyError, match=r"generation_config.json where.*start it with --generation-config vllm"):
        async with serving(base):
            pass


@pytest.mark.parametrize("kind", ["full", "adapter"])
async def test_a_server_without_the_modes_that_updates_need_says_which(base, make_weights, kind):
    weights = make_weights("new", shift=0.5, base=base if kind == "adapter" else None)
    variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if kind == "adapter" else "VLLM_SERVER_DEV_MODE=1"

    off = {"VLLM_SERVER_DEV_MODE": "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ""}
    async with serving(base, env=off) as urls:
        policy = attached(base, urls)
        await policy.start()
        with pytest.raises(PolicyError, match=variable):
            await policy.load(published(weights))


def test_calls_through_the_gateway_carry_ids_logprobs_and_the_adapters_version(base, make_weights):
    async def run():
        store, gateway = MemoryStore(), EmbeddedGateway()
        async with serving(base, replicas=2, lora_rank=4) as urls:
            policy = attached(base, urls)
            served = await policy.start()
            servers = {"base_url": served.base_urls[0], "replicas": served.base_urls[1:]}
            upstream = Upstream(name="main_llm", model=served.model, is_trained=True, **servers)
            url = await gateway.start(store=store, upstreams=[upstream], secret=SECRET)
            try:
                await store.enqueue([Rollout(rollout_id="ro-1", task={})])
                (claim,) = await store.claim(worker="test")
                token = AttemptTokens(SECRET).issue("ro-1", claim.attempt.attempt_id, expires_at=time.time() + 600)
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as client:
                    await ask(client)
                    await gateway.pause("main_llm")
                    served = await policy.load(published(make_weights("a", shift=0.5, base=base)))
                    await gateway.resume("main_llm", model_version=served.version, model=served.model)
                    await ask(client, stream=True)
                await gateway.settle(claim.attempt.attempt_id)
                spans = await store.spans("ro-1")
            finally:
                await gateway.stop()
        return [span.call for span in spans if span.call is not None]

    plain, streamed = asyncio.run(run())
    for call in (plain, streamed):
        assert ([1, 2, 3], [7, 8, 9]) == (unpack_ids(call.prompt_ids), unpack_ids(call.response_ids))
        assert "" == call.ids_missing
    assert ("", "grpo-1") == (plain.model_version, streamed.model_version)
    assert [-1.0, -1.1, -1.2] == pytest.approx(unpack_floats(plain.logprobs))
    assert [-1.5, -1.6, -1.7] == pytest.approx(unpack_floats(streamed.logprobs))


async def ask(client, *, stream=False):
    messages = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.create(model="main_llm", messages=messages, stream=stream)
    return [chunk async for chunk in answer] if stream else answer
