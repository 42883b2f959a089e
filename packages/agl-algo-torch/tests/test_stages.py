"""Stages that start from the adapter of a LoRA stage: their KL reference, and the weights that they train."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.errors import ConfigError
from agl.schemas import ResourceVersion, Weights
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner.model import load_model, open_adapter, trainable_state
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.typed_torch import read_tensors, write_tensors
from agl_algo_torch.ppo import PPO
from agl_algo_torch.preferences import DPO
from agl_objectives.settings import Compute, Lora, Optim
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, made, run

if TYPE_CHECKING:
    from collections.abc import Callable

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.tensor([[10, 20, 30, 40, 50]])
LORA = Lora(rank=4, alpha=8.0)
SMALL: dict[str, Any] = {"tasks_per_step": 4, "group_size": 4, "lr": 3e-3, "threads": 1, "device": "cpu"}
SAME_ADAPTER = {"lora_rank": 4, "lora_alpha": 8.0}


def settings(lora: Lora | None) -> LearnerSettings:
    return LearnerSettings(optim=Optim(lr=0.05), lora=lora or Lora(), compute=Compute(device="cpu", threads=1))


@pytest.fixture
def adapter(model_dir: Path, tmp_path: Path) -> Weights:
    """The weights that a LoRA stage of rank 4 has published, clearly different from the base."""
    learner = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings(LORA))
    for _ in range(3):
        learner.loaded.model(input_ids=IDS, labels=IDS).loss.backward()
        learner.apply({})
    return learner.export(tmp_path / "first", step=1, keep=1)


def bench_of(make: Callable[..., Any], start: Weights, workdir: Path, **params: Any) -> AlgorithmBench:
    scenario = AlgorithmScenario(
        make=lambda: made(make, **{**SMALL, **params}),
        play=World().play,
        tunes=("llm",),
        resources={"llm": start},
    )
    return AlgorithmBench(scenario, workdir)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("params", [{"lora_rank": 0}, SAME_ADAPTER])
def test_dpo_after_a_lora_stage_starts_at_log_two(adapter: Weights, tmp_path: Path, params: dict[str, Any]) -> None:
    (report,) = asyncio.run(run(bench_of(DPO, adapter, tmp_path / "work", steps=1, **params)))
    assert report.metrics["pairs"] > 0
    assert math.log(2) == pytest.approx(report.metrics["loss"], abs=1e-6)


def test_dropout_of_an_adapter_is_off_in_updates(adapter: Weights) -> None:
    config = Path(adapter.uri) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_dropout": 0.5}))
    model = PolicyLearner(origin=adapter, settings=settings(LORA)).loaded.model
    assert torch.equal(logits(model), logits(model))
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("make", [GRPO, PPO])
@pytest.mark.parametrize("params", [{"lora_rank": 0}, SAME_ADAPTER])
def test_kl_after_a_lora_stage_is_measured_from_that_stages_end(
    make: Callable[..., Any], adapter: Weights, tmp_path: Path, params: dict[str, Any]
) -> None:
    first, second = asyncio.run(run(bench_of(make, adapter, tmp_path / "work", steps=2, kl_coef=0.1, **params)))
    assert 0.0 == pytest.approx(first.metrics["kl"], abs=1e-7)
    assert second.metrics["kl"] > 1e-5


@pytest.mark.parametrize("params", [{"lora_rank": 0}, SAME_ADAPTER])
def test_resumed_run_compares_with_the_stages_start_and_not_with_where_it_resumed(
    adapter: Weights, model_dir: Path, tmp_path: Path, params: dict[str, Any]
) -> None:
    """In between another algorithm publishes weights, and removes those that it published before."""
    at_start = logits(PolicyLearner(origin=adapter, settings=settings(LORA)).loaded.model)
    bench = bench_of(GRPO, adapter, tmp_path / "work", steps=3, kl_coef=0.1, **params)
    other = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings(LORA))
    elsewhere = other.export(tmp_path / "second", step=2, keep=1)

    def lives(version: str, weights: Weights) -> None:
        bench._live["llm"] = ResourceVersion(name="llm", version=version, resource=weights, algorithm="sft")

    async def body() -> torch.Tensor:
        async with bench:
            lives("sft-1", adapter)
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            lives("sft-2", elsewhere)
            await algorithm.step()
            state = algorithm.state()
            await algorithm.close()
            shutil.rmtree(adapter.uri)
            again = bench.scenario.make()
            await again.setup(bench.context())
            await again.restore(state)
            with again._tuned.reference.active() as model:
                found = logits(model)
            await again.step()
            return found

    torch.testing.assert_close(at_start, asyncio.run(body()), atol=1e-5, rtol=1e-5)


def test_rank_zero_after_a_lora_stage_trains_all_weights_from_its_end(adapter: Weights) -> None:
    adapted = PolicyLearner(origin=adapter, settings=settings(LORA))
    whole = PolicyLearner(origin=adapter, settings=settings(None))
    torch.testing.assert_close(logits(adapted.loaded.model), logits(whole.loaded.model), atol=1e-5, rtol=1e-5)
    trained = sum(tensor.numel() for tensor in trainable_state(whole.loaded.model).values())
    assert sum(parameter.numel() for parameter in whole.loaded.model.parameters()) == trained


@pytest.mark.parametrize(
    "asked",
    [
        Lora(rank=64, alpha=8.0),
        Lora(rank=4, alpha=32.0),
        Lora(rank=4, alpha=8.0, targets=("q_proj",)),
    ],
)
def test_adapter_of_another_shape_is_refused_with_the_way_out(adapter: Weights, asked: Lora) -> None:
    with pytest.raises(ConfigError, match=r"rank 4 and alpha 8 on .*q_proj.*lora\.rank = \d+.*lora\.rank = 0 to merge"):
        PolicyLearner(origin=adapter, settings=settings(asked))


def test_all_linear_layers_do_not_pass_for_those_of_a_smaller_adapter(model_dir: Path, tmp_path: Path) -> None:
    narrow = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    start = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings(narrow))
    weights = start.export(tmp_path, step=1, keep=1)
    assert PolicyLearner(origin=weights, settings=settings(narrow))
    with pytest.raises(ConfigError, match="on q_proj, v_proj"):
        PolicyLearner(origin=weights, settings=settings(LORA))


# peft warns of them too, and trains on.
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_adapters_of_layers_that_share_their_weights_are_refused(model_dir: Path, layer: str) -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets has the output layer or the embedding of Qwen2ForCausalLM"):
        PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings(Lora(rank=4, targets=("q_proj", layer))))


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
@pytest.mark.parametrize("lora", [LORA, Lora()])
def test_an_adapter_that_fits_no_layer_is_refused_with_both_lists_of_names(
    model_dir: Path, adapter: Weights, lora: Lora
) -> None:
    file = Path(adapter.uri) / "adapter_model.safetensors"
    tensors = read_tensors(file)
    write_tensors({name.replace("model.layers", "language_model.layers"): t for name, t in tensors.items()}, file)
    file.with_name("checksums.sha256").unlink()
    with pytest.raises(
        ConfigError, match=r"does not fit Qwen2ForCausalLM\. .* lack: \[.*lora_A.*without a layer.*\[.*language_model"
    ):
        open_adapter(load_model(str(model_dir), device="cpu").model, adapter.uri, settings=lora)


def test_an_adapter_with_pickled_weights_is_refused(model_dir: Path, adapter: Weights) -> None:
    file = Path(adapter.uri) / "adapter_model.safetensors"
    torch.save(read_tensors(file), file.with_name("adapter_model.bin"))
    file.with_name("checksums.sha256").unlink()
    file.unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors\..*pickled weights"):
        open_adapter(load_model(str(model_dir), device="cpu").model, adapter.uri, settings=LORA)


def test_an_adapter_for_layers_that_the_model_lacks_is_refused(model_dir: Path, adapter: Weights) -> None:
    file = Path(adapter.uri) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["qkv_proj"]}))
    with pytest.raises(ConfigError, match="does not fit Qwen2ForCausalLM"):
        open_adapter(load_model(str(model_dir), device="cpu").model, adapter.uri, settings=LORA)
