"""Loading models, adapters, and exporting weights for serving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.errors import ConfigError
from agl_algo_torch.learner.model import (
    Reference,
    add_lora,
    load_model,
    load_trainable_state,
    served_state,
    trainable_state,
)
from agl_objectives.settings import Lora

if TYPE_CHECKING:
    from pathlib import Path

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def with_lora(model: Any) -> Any:
    adapted = add_lora(model, Lora(rank=4, alpha=8.0))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    return adapted.eval()


def test_a_directory_loads_with_its_tokenizer_and_context(make_loaded: Any, tmp_path: Path) -> None:
    made = make_loaded(context=77)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert 77 == loaded.context_length
    assert torch.equal(logits(made.model), logits(loaded.model))
    assert made.tokenizer.chat_template == loaded.tokenizer.chat_template


def test_an_absent_model_is_named_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such-model.*config\.json"):
        load_model(str(tmp_path / "no-such-model"))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"int4.*float32"):
        load_model("anything", dtype="int4")


def test_a_tokenizer_without_a_template_is_refused(make_loaded: Any, tmp_path: Path) -> None:
    made = make_loaded()
    made.tokenizer.chat_template = None
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        load_model(str(tmp_path))


def test_adapters_train_and_the_base_does_not(make_loaded: Any) -> None:
    adapted = add_lora(make_loaded().model, Lora(rank=4))
    assert trainable_state(adapted)
    assert all(".lora_" in name for name in trainable_state(adapted))


def test_served_weights_of_adapters_give_the_adapted_logits(make_loaded: Any) -> None:
    adapted = with_lora(make_loaded().model)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    plain = make_loaded(seed=1).model
    plain.load_state_dict(served_state(adapted))
    torch.testing.assert_close(logits(adapted), logits(plain), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())


def test_served_weights_are_a_copy(make_loaded: Any) -> None:
    model = make_loaded().model
    state = served_state(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert not torch.equal(state["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_reference_stays_what_it_was_while_training_goes_on(make_loaded: Any, is_adapted: bool) -> None:
    model = make_loaded().model
    expected = logits(model)
    trained = add_lora(model, Lora(rank=4)) if is_adapted else model
    reference = Reference(trained)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    with reference.active() as frozen:
        torch.testing.assert_close(expected, logits(frozen))
    assert not torch.allclose(expected, logits(trained))


def test_a_state_of_another_model_is_refused_by_name(make_loaded: Any) -> None:
    model = make_loaded().model
    state = trainable_state(model)
    name = next(iter(state))
    with pytest.raises(ConfigError, match=name):
        load_trainable_state(model, {key: value for key, value in state.items() if key != name})
    with pytest.raises(ConfigError, match=name):
        load_trainable_state(model, {**state, name: torch.zeros(1)})


def test_weights_in_a_pickle_are_refused_unread(model_dir: Path) -> None:
    torch.save(load_model(str(model_dir)).model.state_dict(), model_dir / "pytorch_model.bin")
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*safetensors"):
        load_model(str(model_dir))
