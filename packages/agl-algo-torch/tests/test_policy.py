"""The policy as the trainer uses it: start, load, publish, stop."""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from agl.contracts import POLICY_KEY_ENV, ServedModel
from agl.errors import ConfigError, PolicyError
from agl.schemas import PromptTemplate, ResourceVersion, Weights
from agl.stores import MemoryStore
from agl_algo_torch.learner.checkpoint import save_served
from agl_algo_torch.learner.model import LoadedModel, add_lora
from agl_algo_torch.serving.policy import TorchPolicy
from agl_objectives.settings import Lora
from agl_run.run.opponents import PastPolicy
from agl_testing.waiting import eventually

Make = Callable[..., LoadedModel]


def with_adapter(loaded: LoadedModel) -> Any:
    model = add_lora(loaded.model, Lora(rank=4)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model


def version_of(resource: Any, version: str = "sft-1") -> ResourceVersion:
    return ResourceVersion(name="main_llm", version=version, resource=resource)


def greedy(policy: TorchPolicy, *, model: str = "") -> dict[str, Any]:
    with openai.OpenAI(base_url=policy.base_url, api_key=os.environ[POLICY_KEY_ENV], max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model or policy.model_name,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=10,
            temperature=0,
            logprobs=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    return answer.model_dump()


@torch.no_grad()
def check_served_by(model: Any, answer: dict[str, Any]) -> None:
    prompt_ids, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    logprobs = model(torch.tensor([prompt_ids + ids])).logits[0].log_softmax(-1)
    expected = [logprobs[len(prompt_ids) - 1 + i, token].item() for i, token in enumerate(ids)]
    assert expected == pytest.approx([one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]], abs=1e-5)


def test_a_policy_starts_from_a_directory_and_says_where_it_serves(make_loaded: Make, tmp_path: Path) -> None:
    loaded = make_loaded(seed=3)
    save_served(loaded, tmp_path / "model")
    policy = TorchPolicy(name="main_llm", model=str(tmp_path / "model"), device="cpu", model_name="pupil")

    async def run() -> None:
        served = await policy.start()
        assert (
            ServedModel(base_urls=(policy.base_url,), model="pupil", version="0", api_key_env=POLICY_KEY_ENV) == served
        )
        assert policy.base_url.endswith("/v1")
        check_served_by(loaded.model, await asyncio.to_thread(greedy, policy))
        await policy.stop()
        await policy.stop()

    asyncio.run(run())
    assert Weights(uri=str(tmp_path / "model")) == policy.resource()
    assert policy.has_token_ids


def test_training_the_model_does_not_change_what_is_served_until_it_is_published(
    make_loaded: Make, serve: Callable[..., TorchPolicy]
) -> None:
    loaded, old = make_loaded(), make_loaded()
    policy = serve(loaded)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    check_served_by(old.model, greedy(policy))
    asyncio.run(policy.publish(loaded.model.state_dict(), "grpo-1"))
    answer = greedy(policy)
    check_served_by(loaded.model, answer)
    assert "grpo-1" == answer["model_version"] == policy.model_version


def test_loading_serves_full_weights_from_disk(
    make_loaded: Make, serve: Callable[..., TorchPolicy], tmp_path: Path
) -> None:
    new = make_loaded(seed=5)
    weights = save_served(new, tmp_path / "served")
    policy = serve(make_loaded())
    served = asyncio.run(policy.load(version_of(weights)))
    check_served_by(new.model, greedy(policy))
    assert "sft-1" == policy.model_version == served.version


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own call
def test_loading_merges_an_adapter_into_its_base(
    make_loaded: Make, serve: Callable[..., TorchPolicy], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="adapters need the extra lora")
    base = make_loaded(seed=2)
    save_served(base, tmp_path / "base")
    model = add_lora(make_loaded(seed=2).model, Lora(rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted = LoadedModel(
        name=str(tmp_path / "base"), model=model.eval(), tokenizer=base.tokenizer, device=torch.device("cpu")
    )
    weights = save_served(adapted, tmp_path / "adapter")
    policy = serve(make_loaded())
    asyncio.run(policy.load(version_of(weights)))
    check_served_by(model, greedy(policy))
    from_memory = serve(adapted)
    check_served_by(model, greedy(from_memory))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_several_versions_are_served_at_once_each_under_its_name(
    make_loaded: Make, serve: Callable[..., TorchPolicy], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="adapters need the extra lora")
    full, uri = make_loaded(seed=5), save_served(make_loaded(), tmp_path / "base").uri
    base, adapted = replace(make_loaded(), name=uri), replace(make_loaded(), name=uri)
    adapted = replace(adapted, model=with_adapter(adapted))
    policy = serve(base)
    versions = {
        "full": (save_served(full, tmp_path / "full"), full),
        "lora": (save_served(adapted, tmp_path / "lora"), adapted),
        "first": (policy.resource(), base),
    }

    found = asyncio.run(policy.serve_versions([version_of(one, name) for name, (one, _) in versions.items()]))

    assert list(versions) == list(found)
    for name, (_, meant) in versions.items():
        assert ((policy.base_url,), f"tiny@{name}", name) == (
            found[name].base_urls,
            found[name].model,
            found[name].version,
        )
        answer = greedy(policy, model=found[name].model)
        assert name == answer["model_version"]
        check_served_by(meant.model, answer)

    asyncio.run(policy.serve_versions([version_of(versions["lora"][0], "lora")]))
    check_served_by(adapted.model, greedy(policy, model="tiny@lora"))
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny', 'tiny@lora'"):
        greedy(policy, model="tiny@full")
    check_served_by(base.model, greedy(policy))


def test_what_cannot_be_loaded_is_refused_and_the_old_weights_stay(
    make_loaded: Make, serve: Callable[..., TorchPolicy], tmp_path: Path
) -> None:
    policy = serve(make_loaded())
    with pytest.raises(ConfigError, match="PromptTemplate"):
        asyncio.run(policy.load(version_of(PromptTemplate(template="x"))))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        asyncio.run(policy.load(version_of(Weights(uri=str(tmp_path)))))
    state = make_loaded(seed=1).model.state_dict()
    for change, words in (
        ({"model.norm.weight": None}, "model.norm.weight .missing"),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight .shape \(3,\), not \(64,\)"),
        ({"strange": torch.ones(1)}, "strange .unknown"),
    ):
        wrong = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
        with pytest.raises(ConfigError, match=words):
            asyncio.run(policy.publish(wrong, "2"))
    check_served_by(make_loaded().model, greedy(policy))
    assert "0" == policy.model_version


def test_a_tied_tensor_may_be_missing(make_loaded: Make, serve: Callable[..., TorchPolicy]) -> None:
    new = make_loaded(seed=1)
    state = dict(new.model.state_dict())
    del state["lm_head.weight"]
    policy = serve(make_loaded())
    asyncio.run(policy.publish(state, "1"))
    check_served_by(new.model, greedy(policy))


def test_weights_can_be_published_before_the_start(make_loaded: Make) -> None:
    new = make_loaded(seed=1)
    policy = TorchPolicy(name="tiny", model=make_loaded())

    async def run() -> None:
        await policy.publish(new.model.state_dict(), "1")
        await policy.start()
        check_served_by(new.model, await asyncio.to_thread(greedy, policy))
        await policy.stop()

    asyncio.run(run())


def test_a_port_in_use_is_an_error_that_names_it(make_loaded: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        policy = TorchPolicy(name="tiny", model=make_loaded(), port=port)
        with pytest.raises(PolicyError, match=f"127.0.0.1:{port}"):
            asyncio.run(policy.start())
        asyncio.run(policy.stop())


def test_settings_are_checked_when_it_is_constructed(make_loaded: Make) -> None:
    with pytest.raises(ConfigError, match="temprature"):
        TorchPolicy(name="tiny", model=make_loaded(), temprature=1.0)
    with pytest.raises(ConfigError, match="auto, deepseek_v3, glm45, hermes"):
        TorchPolicy(name="tiny", model=make_loaded(), tool_parser="pythonic")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TorchPolicy(name="tiny", model="/no/such/model")


def test_stopping_answers_running_requests_with_503(make_loaded: Make) -> None:
    policy = TorchPolicy(name="tiny", model=make_loaded())

    async def run() -> None:
        await policy.start()
        async with openai.AsyncOpenAI(
            base_url=policy.base_url, api_key=os.environ[POLICY_KEY_ENV], max_retries=0
        ) as client:
            asked = asyncio.create_task(
                client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=900,
                    extra_body={"ignore_eos": True},
                )
            )
            await eventually(lambda: policy.health()["running"])
            await policy.stop()
            with pytest.raises(openai.InternalServerError) as caught:
                await asked
            assert 503 == caught.value.status_code
        with pytest.raises(PolicyError, match="stopped"):
            await policy.start()

    asyncio.run(run())


def test_opponent_is_unloaded_when_the_first_version_is_live_again(
    make_loaded: Make, serve: Callable[..., TorchPolicy], tmp_path: Path
) -> None:
    policy = serve(make_loaded())
    weights = save_served(make_loaded(seed=5), tmp_path / "served")
    first, second = version_of(policy.resource(), "first"), version_of(weights, "second")
    opponent = PastPolicy(name="rival", of="llm")
    opponent.bind(policy, ServedModel(base_urls=(policy.base_url,), model="tiny"))

    async def play() -> None:
        store = MemoryStore()
        for newest, drawn in ((second, first), (first, first)):
            await opponent.draw(store, newest, seed=0)
            await opponent.load(drawn)

    asyncio.run(play())
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        greedy(policy, model="tiny@first")
