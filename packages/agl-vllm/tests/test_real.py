"""Real vLLM: exact tokens and log-probabilities, adapters in place, a wrong reload caught, a killed replica replaced.

Runs where vLLM is installed for this interpreter; CPU builds will do.
"""

import asyncio
import importlib.util
import itertools
import json
import os
import shutil
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from agl.contracts import Upstream
from agl.errors import PolicyError
from agl.schemas import ResourceVersion, Rollout, unpack_floats, unpack_ids
from agl.stores import MemoryStore
from agl_gateway.embedded import EmbeddedGateway
from agl_run.access.tokens import AttemptTokens
from agl_vllm.policy import VLLMPolicy
from agl_vllm.server import LaunchSettings

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed for this interpreter"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
SECRET = b"a secret of these tests"
ARGS = ["--enforce-eager", "--max-model-len", "1024", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Compute.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_model(folder):
    """Save a random Qwen2 model of two layers with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # 32 dimensions each, which vLLM's attention on CPUs asks for
        num_key_value_heads=1,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def publish(loaded, folder, version):
    """Change the weights as training would, and export them as an algorithm does."""
    import torch

    from agl_algo_torch.learner.checkpoint import save_served
    from agl_algo_torch.learner.model import trainable_state

    torch.manual_seed(len(version))
    with torch.no_grad():
        for parameter in trainable_state(loaded.model).values():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return ResourceVersion(name="main_llm", version=version, resource=save_served(loaded, folder / version))


def opened(weights):
    """Load the exported weights from the files."""
    from agl_algo_torch.learner.model import load_model

    if weights.format == "hf":
        return load_model(weights.uri, device="cpu").model
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(weights.base_model, device="cpu").model, weights.uri)


def check_exact(call, model, *, tolerance=1e-5):
    """Check that the recorded log-probabilities equal those of a direct forward pass."""
    import torch

    assert "" == call.ids_missing
    prompt, response = unpack_ids(call.prompt_ids), unpack_ids(call.response_ids)
    assert response
    temperature = call.sampling.temperature or 1.0
    with torch.no_grad():
        logprobs = (model(torch.tensor([prompt + response])).logits[0].float() / temperature).log_softmax(-1)
    expected = [float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(response)]
    assert expected == pytest.approx(unpack_floats(call.logprobs), abs=tolerance)


class Stage:
    """A gateway in front of a policy's servers, and attempts that make calls through the gateway."""

    def __init__(self, gateway, store, policy, url):
        self.gateway, self.store, self.policy, self.url = gateway, store, policy, url

    async def begin(self, rollout_id):
        await self.store.enqueue([Rollout(rollout_id=rollout_id, task={})])
        (claim,) = await self.store.claim(worker="test")
        token = AttemptTokens(SECRET).issue(rollout_id, claim.attempt.attempt_id, expires_at=time.time() + 900)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=300.0)

    async def calls(self, rollout_id):
        await self.gateway.settle(f"{rollout_id}.1")
        return [span.call for span in await self.store.spans(rollout_id) if span.call is not None]

    async def load(self, version):
        """Load a version as an experiment does."""
        await self.gateway.pause("main_llm")
        served = await self.policy.load(version)
        await self.gateway.resume("main_llm", model_version=served.version, model=served.model)


@asynccontextmanager
async def stage(model, *, dtype="float32", args=(), **settings):
    policy = VLLMPolicy(name="main_llm", model=str(model), dtype=dtype, args=[*ARGS, *args], env=ENV, **settings)
    gateway, store = EmbeddedGateway(), MemoryStore()
    try:
        served = await policy.start()
        servers = {"base_url": served.base_urls[0], "replicas": served.base_urls[1:]}
        upstream = Upstream(name="main_llm", model=served.model, is_trained=True, **servers)
        yield Stage(gateway, store, policy, await gateway.start(store=store, upstreams=[upstream], secret=SECRET))
    finally:
        await gateway.stop()
        await policy.stop()


async def ask(client, text="hi", *, stream=False, **settings):
    messages = [{"role": "user", "content": text}]
    options = {"model": "main_llm", "messages": messages, "max_tokens": 12, "stream": stream, **settings}
    answer = await client.chat.completions.create(**options)
    return [chunk async for chunk in answer] if stream else answer


async def ask_every_way(client):
    """Ask with and without streaming and tools, at two temperatures, and at both endpoints."""
    for stream in (False, True):
        await ask(client, stream=stream, temperature=0.7)
        await ask(client, stream=stream, tools=[TOOL])
        answer = await client.completions.create(model="main_llm", prompt="7*8=", max_tokens=8, stream=stream)
        if stream:
            assert [chunk async for chunk in answer]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


def test_calls_are_exact_before_and_after_an_adapter_and_a_wrong_reload_is_caught(model, tmp_path):
    from agl_algo_torch.learner.model import LoadedModel, add_lora, load_model
    from agl_objectives.settings import Lora

    base = load_model(str(model), device="cpu")
    adapted = add_lora(load_model(str(model), device="cpu").model, Lora(rank=4))
    tuned = LoadedModel(name=str(model), model=adapted, tokenizer=base.tokenizer, device=base.device)

    async def run():
        async with stage(model, lora_rank=4, sync="reload") as it:
            client = await it.begin("ro-1")
            async with client:
                await ask_every_way(client)
                for version in ("lora-1", "lora-02"):
                    weights[version] = publish(tuned, tmp_path, version)
                    await it.load(weights[version])
                    await ask_every_way(client)
            whole = publish(base, tmp_path, "full-1")
            try:
                await it.policy.load(whole)
            except PolicyError as error:
                return await it.calls("ro-1"), str(error)
            return await it.calls("ro-1"), ""

    weights = {}
    calls, refusal = asyncio.run(run())
    assert 18 == len(calls)
    check = [(calls[:6], "", load_model(str(model), device="cpu").model)]
    check += [(calls[a : a + 6], v, opened(weights[v].resource)) for a, v in ((6, "lora-1"), (12, "lora-02"))]
    for served, version, expected in check:
        for call in served:
            assert version == call.model_version
            check_exact(call, expected)
    # vLLM 0.32 on CPUs answers the reload with 200 and computes with wrong weights
    assert "said that it had taken the weights 'full-1', and does not serve them" in refusal


def test_full_weights_are_exact_after_a_restart_and_a_killed_replica_is_replaced(model, tmp_path):
    from agl_algo_torch.learner.model import load_model

    whole = publish(load_model(str(model), device="cpu"), tmp_path, "full-1")

    async def run():
        async with stage(model, replicas=2) as it:
            await it.load(whole)
            pids = [server._process.pid for server in it.policy._servers]
            clients = [await it.begin(f"ro-{number}") for number in range(4)]
            for client in clients:
                await ask(client)
            victim = program_below(pids[0])
            os.kill(victim, signal.SIGKILL)
            await asyncio.gather(*(ask(client, "again", stream=at % 2 == 0) for at, client in enumerate(clients)))
            for client in clients:
                await client.close()
            return [await it.calls(f"ro-{number}") for number in range(4)]

    for calls in asyncio.run(run()):
        assert 2 == len(calls) == len({call.request_id for call in calls})
        for call in calls:
            assert "full-1" == call.model_version
            check_exact(call, opened(whole.resource))


CHOSEN = {"type": "object", "properties": {"expression": {"enum": ["7*8", "8*7"]}}, "required": ["expression"]}
FORCED = {"tools": [{"type": "function", "function": {**TOOL["function"], "parameters": CHOSEN}}]}
PLAIN = {**FORCED, "tool_choice": "none", "max_tokens": 12}
WORDS = {**PLAIN, "extra_body": {"structured_outputs": {"regex": "[a-z]{3,9}"}}}
"""Settings that make the model write letters; a random model's bytes are often no text."""
FORCED |= {"tool_choice": "required", "max_tokens": 100}
COMPACT = ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']


async def converse(it, turns):
    """Run a conversation whose client changes white space in arguments; the model must call a tool every second turn.

    The last answer has no restrictions.
    """
    client = await it.begin("ro-1")
    messages = [{"role": "user", "content": "hi"}]
    async with client:
        for turn in range(turns):
            how = PLAIN if turn == turns - 1 else FORCED if turn % 2 else WORDS
            answer = await client.chat.completions.create(model="main_llm", messages=messages, **how)
            message = answer.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
            messages.append(message)
            called = message.get("tool_calls")
            said = {"role": "tool", "tool_call_id": called[0]["id"]} if called else {"role": "user"}
            messages.append({**said, "content": f"go on {turn}"})
    return await it.calls("ro-1")


def check_continued(calls, model, **tolerance):
    """Check that each prompt begins with the tokens of the turn before, and that the last answer is exact."""
    for before, after in itertools.pairwise(calls):
        known = [*unpack_ids(before.prompt_ids), *unpack_ids(before.response_ids)]
        assert known == list(unpack_ids(after.prompt_ids))[: len(known)]
    check_exact(calls[-1], model, **tolerance)


def test_turns_of_a_conversation_continue_the_recorded_tokens(model):
    from agl_algo_torch.learner.model import load_model

    async def run():
        async with stage(model, args=COMPACT) as it:
            return await converse(it, 5), it.policy.counts()

    calls, counts = asyncio.run(run())
    assert {"first": 1, "spliced": 4} == counts
    assert ["tool_calls", "tool_calls"] == [call.finish_reason for call in calls[1::2]]
    check_continued(calls, load_model(str(model), device="cpu").model)


@pytest.mark.parametrize("own", [{"temperature": 0.7}, {"top_p": 0.95}, {"top_k": 20}, {"repetition_penalty": 1.3}])
def test_a_models_own_sampling_parameters_are_noticed(model, tmp_path, monkeypatch, own):
    """A server that was started without ``--generation-config vllm`` uses such parameters."""
    folder = tmp_path / "own"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(own))

    command = LaunchSettings.command

    def without_the_option(server, **settings):
        return ["auto" if word == "vllm" else word for word in command(server, **settings)]

    async def run():
        policy = VLLMPolicy(name="main_llm", model=str(folder), dtype="float32", args=ARGS, env=ENV)
        with pytest.raises(PolicyError, match="start it with --generation-config vllm"):
            await policy.start()
        await policy.stop()

    monkeypatch.setattr(LaunchSettings, "command", without_the_option)
    asyncio.run(run())


def has_gpu():
    import torch

    return torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_VLLM or not has_gpu(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("sync", ["reload", "sleep"])
def test_calls_on_a_gpu_are_those_of_the_weights_that_were_loaded_in_place(model, tmp_path, sync):
    from agl_algo_torch.learner.model import LoadedModel, add_lora, load_model
    from agl_objectives.settings import Lora

    base = load_model(str(model), device="cpu")
    adapted = add_lora(load_model(str(model), device="cpu").model, Lora(rank=4))
    tuned = LoadedModel(name=str(model), model=adapted, tokenizer=base.tokenizer, device=base.device)
    whole, adapters = publish(base, tmp_path, "full-1"), publish(tuned, tmp_path, "lora-02")

    async def run():
        memory = ["--gpu-memory-utilization", "0.2"]
        async with stage(model, dtype="bfloat16", args=memory, lora_rank=4, sync=sync) as it:
            client = await it.begin("ro-1")
            async with client:
                for version in (adapters, whole):
                    await it.load(version)
                    await ask_every_way(client)
            return await it.calls("ro-1")

    calls = asyncio.run(run())
    assert 12 == len(calls)
    for version, served in ((adapters, calls[:6]), (whole, calls[6:])):
        expected = opened(version.resource)
        for call in served:
            check_exact(call, expected, tolerance=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_VLLM or not has_gpu(), reason="needs a GPU that torch can use")
def test_turns_on_a_gpu_continue_the_recorded_tokens(model):
    from agl_algo_torch.learner.model import load_model

    async def run():
        memory = ["--gpu-memory-utilization", "0.2"]
        async with stage(model, dtype="bfloat16", args=[*COMPACT, *memory]) as it:
            return await converse(it, 11), it.policy.counts()

    calls, counts = asyncio.run(run())
    assert {"first": 1, "spliced": 10} == counts
    check_continued(calls, load_model(str(model), device="cpu").model, tolerance=3e-2)


def program_below(pid):
    """Return the id of the process that a guard runs."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
