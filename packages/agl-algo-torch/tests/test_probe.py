"""Exported weights have a probe: the model's log-probabilities of a fixed text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.schemas import read_probe
from agl_algo_torch.learner.checkpoint import make_probe, save_served
from agl_algo_torch.learner.model import add_lora, load_model, trainable_state
from agl_objectives.settings import Lora

if TYPE_CHECKING:
    from agl.schemas import Weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def opened(weights: Weights) -> Any:
    if weights.format == "hf":
        return load_model(weights.uri, device="cpu").model
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(weights.base_model, device="cpu").model, weights.uri)


@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
def test_the_probe_of_an_export_is_what_a_fresh_reader_of_the_files_finds(
    model_dir: Path, tmp_path: Path, is_lora: bool
) -> None:
    loaded = load_model(str(model_dir), device="cpu")
    if is_lora:
        object.__setattr__(loaded, "model", add_lora(loaded.model, Lora(rank=4)))
    before = make_probe(loaded)
    with torch.no_grad():
        for parameter in trainable_state(loaded.model).values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    loaded.model.train()
    weights = save_served(loaded, tmp_path / "served")
    probe = read_probe(Path(weights.uri))
    assert probe is not None
    assert before is not None
    with torch.no_grad():
        logp_TV = opened(weights)(torch.tensor([probe.token_ids])).logits[0].log_softmax(-1)
    expected = [float(logp_TV[i, token]) for i, token in enumerate(probe.token_ids[1:])]
    assert expected == pytest.approx(list(probe.logprobs), abs=1e-5)
    assert list(before.logprobs) != pytest.approx(list(probe.logprobs), abs=0.05)
    assert loaded.model.training


def test_a_tokenizer_that_cannot_write_the_text_gives_no_probe(make_loaded: Any, monkeypatch: Any) -> None:
    loaded = make_loaded()
    monkeypatch.setattr(type(loaded.tokenizer), "encode", lambda *_args, **_options: [])
    assert make_probe(loaded) is None
