"""VERL publishes, with its weights, their log-probabilities of a fixed text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agl.schemas import PROBE_FILE, Weights, read_probe
from agl_algo_verl.weights.probe import probe_files
from agl_testing.conformance.bench import AlgorithmBench

from .world import scenario

if TYPE_CHECKING:
    from agl.schemas import WeightsProbe


def logprobs(uri: str, probe: WeightsProbe) -> list[float]:
    """Return the log-probabilities of the probe's tokens under weights newly loaded from the files."""
    with torch.no_grad():
        ids = torch.tensor([probe.token_ids])
        logp_TV = AutoModelForCausalLM.from_pretrained(uri)(input_ids=ids).logits[0].log_softmax(-1)
    return [float(logp_TV[i, token]) for i, token in enumerate(probe.token_ids[1:])]


@pytest.mark.parametrize("keys", [{}, {"model.lora_rank": 4, "model.lora_alpha": 8}], ids=["full", "lora"])
def test_the_probe_of_published_weights_is_what_a_fresh_reader_of_the_files_finds(
    keys: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    bench = AlgorithmBench(
        scenario(model_dir, **{"trainer.total_training_steps": 1, "rollout.temperature": 0.5, **keys}), tmp_path
    )

    async def body() -> None:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            await algorithm.close()

    asyncio.run(body())
    weights = bench.published[-1].resource
    assert isinstance(weights, Weights)
    probe = read_probe(Path(weights.uri))
    assert probe is not None
    assert 48 == len(probe.token_ids)
    assert logprobs(weights.uri, probe) == pytest.approx(list(probe.logprobs), abs=1e-5)
    assert logprobs(str(model_dir), probe) != pytest.approx(list(probe.logprobs), abs=1e-3)

    (Path(weights.uri) / PROBE_FILE).unlink()
    probe_files(weights)
    again = read_probe(Path(weights.uri))
    assert again is not None
    assert probe.token_ids == again.token_ids
    assert probe.logprobs == pytest.approx(again.logprobs, abs=1e-5)
