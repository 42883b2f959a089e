"""Adapters are published with their base, and training continues from an adapter that another stage has published."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl.errors import ConfigError
from agl.schemas import ResourceVersion, Weights
from agl_algo_verl.ray.trainer import RayVERL
from agl_algo_verl.serving.policy import VerlPolicy
from agl_algo_verl.weights.adapters import whole_weights
from agl_testing.conformance.bench import AlgorithmBench

from .world import adapter, config, scenario, whole_model

if TYPE_CHECKING:
    from agl.contracts import StepReport

LORA: dict[str, Any] = {"model.lora_rank": 4, "model.lora_alpha": 16, "actor.optim.lr": 3e-2}
IDS = torch.tensor([[5, 9, 17, 4, 30, 12]])


def trained(
    model_dir: Path, folder: Path, *, start: Weights | None = None, **keys: Any
) -> tuple[list[StepReport], AlgorithmBench]:
    bench = AlgorithmBench(scenario(model_dir, **{"trainer.total_training_steps": 2, **keys}), folder)

    async def body() -> list[StepReport]:
        async with bench:
            if start is not None:
                bench._live["llm"] = ResourceVersion(name="llm", version="sft-1", resource=start, algorithm="sft")
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            reports = [await algorithm.step(), await algorithm.step()]
            await algorithm.close()
            return reports

    return asyncio.run(body()), bench


def test_adapters_are_published_beside_their_base_which_is_written_no_more(model_dir: Path, tmp_path: Path) -> None:
    reports, bench = trained(model_dir, tmp_path, **LORA)
    weights = bench.published[-1].resource
    assert isinstance(weights, Weights)
    assert ("lora", str(model_dir)) == (weights.format, weights.base_model)
    folder = Path(weights.uri)
    assert {4.0} == {float(min(tensor.shape)) for tensor in load_file(folder / "adapter_model.safetensors").values()}
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (str(model_dir), 4, 16, True) == tuple(
        described[name] for name in ("base_model_name_or_path", "r", "lora_alpha", "inference_mode")
    )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size < sum(path.stat().st_size for path in model_dir.glob("*.safetensors")) / 2
    assert max(report.metrics["logprob_gap"] for report in reports) < 1e-5
    assert AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("keys", [{"actor.optim.lr": 1e-3}, LORA], ids=["all weights", "adapters"])
def test_training_goes_on_from_an_adapter_with_what_it_said_as_the_reference(
    keys: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    start = adapter(model_dir, tmp_path / "sft")
    (first, second), bench = trained(model_dir, tmp_path, start=start, **{"actor.use_kl_loss": True, **keys})
    assert first.metrics["logprob_gap"] < 1e-5
    assert abs(first.metrics["kl"]) < 1e-7 < second.metrics["kl"]
    weights = bench.published[-1].resource
    assert isinstance(weights, Weights)
    with torch.no_grad():
        told = [model(IDS).logits for model in (whole_model(weights), whole_model(start))]
    assert 1e-3 < float((told[0] - told[1]).abs().max()) < 5.0


def test_an_adapter_is_merged_once_and_exactly(model_dir: Path, tmp_path: Path) -> None:
    start = adapter(model_dir, tmp_path / "sft")
    found = whole_weights(start, workdir=tmp_path)
    written = Path(found.uri, "model.safetensors").stat().st_mtime_ns
    assert found == whole_weights(start, workdir=tmp_path)
    assert written == Path(found.uri, "model.safetensors").stat().st_mtime_ns
    with torch.no_grad():
        told = [model(IDS).logits for model in (whole_model(found), whole_model(start))]
    torch.testing.assert_close(*told, atol=1e-6, rtol=1e-6)
    assert AutoTokenizer.from_pretrained(found.uri)
    assert whole_weights(plain := Weights(uri="m"), workdir=tmp_path) is plain


def test_merged_weights_are_removed_once_nothing_names_them(model_dir: Path, tmp_path: Path) -> None:
    """Another algorithm publishes an adapter before each step; before the third, it is one on the merged weights."""
    keys = {"trainer.total_training_steps": 5}
    bench = AlgorithmBench(scenario(model_dir, **LORA, **keys), tmp_path)
    starts = [adapter(model_dir, tmp_path / f"sft-{number}") for number in range(5)]

    def merged() -> set[str]:
        return {path.name for path in (tmp_path / "merged").iterdir()}

    async def body() -> list[str]:
        async with bench:
            algorithm, found = bench.scenario.make(), list[str]()
            await algorithm.setup(bench.context())
            for number, start in enumerate(starts, start=1):
                version = ResourceVersion(name="llm", version=f"sft-{number}", resource=start, algorithm="sft")
                bench._live["llm"] = version
                await algorithm.step()
                base = bench.published[-1].resource.base_model
                found.append(Path(base).name)
                assert set(found[-2:]) <= merged()  # the two checkpoints that are kept continue from them
                if number == 3:
                    on_it = Weights(uri=str(tmp_path / "other"), base_model=base, format="lora")
                    await bench.store.publish([ResourceVersion(name="llm", version="o", resource=on_it, algorithm="o")])
            await algorithm.close()
            return found

    found = asyncio.run(body())
    assert set(found[2:]) == merged()


def test_an_adapter_whose_base_is_gone_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    missing = Weights(uri=str(tmp_path / "a"), base_model=str(tmp_path / "b"), format="lora")
    with pytest.raises(ConfigError, match=r"cannot be merged into its base .*b'.*the model that it was trained on"):
        whole_weights(missing, workdir=tmp_path)
    assert not list((tmp_path / "merged").glob("[0-9a-f]*"))


def test_verls_trainer_on_ray_starts_from_the_merged_adapter(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = adapter(model_dir, tmp_path / "sft")
    policies = {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)}
    bench = AlgorithmBench(replace(scenario(model_dir), policies=lambda _: policies), tmp_path)

    async def launch(algorithm: RayVERL) -> Any:
        return algorithm

    monkeypatch.setattr(RayVERL, "_launch", launch)

    async def body() -> RayVERL:
        async with bench:
            bench._live["llm"] = ResourceVersion(name="llm", version="sft-1", resource=start, algorithm="sft")
            algorithm = RayVERL(**config(**{"rollout.name": "agl_hf"}))
            await algorithm.setup(bench.context())
            await algorithm._open()
            return algorithm

    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(asyncio.run(body())._origin)
        torch.testing.assert_close(merged(IDS).logits, whole_model(start)(IDS).logits, atol=1e-6, rtol=1e-6)
