"""Weights are exchanged in place: adapters on an unchanged base, whole weights, and sequences of both."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.learner.checkpoint import save_served
from agl_algo_torch.learner.model import LoadedModel, add_lora, load_model
from agl_algo_torch.serving.weight_swap import ServedWeights
from agl_objectives.adapters import HeldAdapter
from agl_objectives.settings import Lora

peft = pytest.importorskip("peft", reason="adapters need the extra lora")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own

Make = Callable[..., LoadedModel]
CLOSE = 1e-5
IDS = torch.tensor([[5, 9, 17, 4, 30, 12]])


@torch.no_grad()
def logits(loaded: LoadedModel) -> Tensor:
    return loaded.model(IDS).logits


class Stock:
    """Makes bases and adapters on disk, each with the equal model in memory."""

    def __init__(self, make: Make, folder: Path) -> None:
        self._make, self._folder = make, folder

    def base(self, seed: int = 0) -> tuple[Weights, LoadedModel]:
        loaded = self._make(seed=seed)
        weights = save_served(loaded, self._folder / f"base-{seed}")
        return weights, LoadedModel(
            name=weights.uri, model=loaded.model, tokenizer=loaded.tokenizer, device=loaded.device
        )

    def adapter(self, number: int, *, seed: int = 0, **settings: object) -> tuple[Weights, LoadedModel]:
        weights, loaded = self.base(seed)
        torch.manual_seed(100 + number)
        model = add_lora(loaded.model, Lora(**{"rank": 4, **settings})).eval()  # type: ignore[arg-type]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
        adapted = LoadedModel(name=weights.uri, model=model, tokenizer=loaded.tokenizer, device=loaded.device)
        return save_served(adapted, self._folder / f"adapter-{number}"), adapted


def untied(base: Callable[..., tuple[Weights, LoadedModel]]) -> Callable[..., tuple[Weights, LoadedModel]]:
    """Return a function like `base` whose models have a head with separate weights."""

    def make(stock: Stock, seed: int = 0) -> tuple[Weights, LoadedModel]:
        weights, loaded = base(stock, seed)
        model: Any = loaded.model
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
        return save_served(loaded, Path(weights.uri)), loaded

    return make


@pytest.fixture
def stock(make_loaded: Make, tmp_path: Path) -> Stock:
    return Stock(make_loaded, tmp_path)


def test_an_adapter_serves_as_it_trained_and_the_next_one_needs_nothing_of_the_base(stock: Stock) -> None:
    _, serving = stock.base()
    served = ServedWeights(serving)
    weights, trained = stock.adapter(1)
    served.apply(served.read(weights))
    assert torch.allclose(logits(trained), logits(serving), atol=CLOSE)

    following, trained = stock.adapter(2)
    shutil.rmtree(following.base_model)
    served.apply(served.read(following))
    assert torch.allclose(logits(trained), logits(serving), atol=CLOSE)


def test_an_adapter_of_the_head_is_served_beside_it(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stock, "base", untied(Stock.base))
    _, serving = stock.base()
    served, before = ServedWeights(serving), copy.deepcopy(serving.model.state_dict())
    weights, trained = stock.adapter(1, targets=("q_proj", "lm_head"))
    for exchange in (served.read(weights), served.take(trained)):
        assert not exchange.base
        served.apply(exchange)
        assert torch.allclose(logits(trained), logits(serving), atol=CLOSE)
    torch.testing.assert_close(serving.model.state_dict(), before, rtol=0, atol=0)


def test_versions_of_every_kind_follow_each_other(stock: Stock) -> None:
    _, serving = stock.base()
    served = ServedWeights(serving)
    chain = [
        stock.adapter(1),
        stock.adapter(2, rank=8, alpha=4.0),  # another form
        stock.base(3),  # whole weights
        stock.adapter(4),  # on the base of before, which is in the model no longer
        stock.adapter(5, targets=("q_proj", "down_proj")),
        stock.adapter(6, seed=7, targets=("q_proj", "down_proj")),  # on another base
        stock.base(0),
    ]
    for weights, meant in chain:
        exchange = served.read(weights)
        assert (exchange.adapter is not None) == (weights.format == "lora")
        served.apply(exchange)
        assert torch.allclose(logits(meant), logits(serving), atol=CLOSE), weights


def test_weights_beside_others_share_the_base_until_one_of_them_changes_it(stock: Stock) -> None:
    _, serving = stock.base()
    served = ServedWeights(serving)
    kinds = [stock.adapter(1), stock.adapter(2), stock.base(0), stock.base(3)]
    served.apply(served.read(kinds[0][0]))
    beside = [served.beside(weights) for weights, _ in kinds[1:]]
    address = next(serving.model.parameters()).data_ptr()
    shares = [next(one.model.parameters()).data_ptr() == address for one in beside]
    assert [True, True, False] == shares

    served.apply(served.read(stock.base(5)[0]))

    models = [replace(serving, model=one.model) for one in beside]
    for (_, meant), model in zip([*kinds[1:], stock.base(5)], [*models, serving], strict=True):
        assert torch.allclose(logits(meant), logits(model), atol=CLOSE)


def test_a_policy_that_merges_adapters_merges_them(stock: Stock) -> None:
    _, serving = stock.base()
    served = ServedWeights(serving, merges=True)
    weights, trained = stock.adapter(1)
    exchange = served.read(weights)
    assert exchange.adapter is None
    served.apply(exchange)
    assert torch.allclose(logits(trained), logits(serving), atol=CLOSE)


def held(weights: Weights, trained: LoadedModel) -> HeldAdapter:
    """Return the adapter of a model as an algorithm of another package offers it."""
    config = trained.model.peft_config["default"].to_dict()  # type: ignore[union-attr, index]
    return HeldAdapter(base=weights.base_model, config=config, tensors=peft.get_peft_model_state_dict(trained.model))


@pytest.mark.parametrize("merges", [False, True])
def test_an_adapter_in_memory_serves_as_it_does_from_disk(stock: Stock, merges: bool) -> None:
    _, serving = stock.base()
    served = ServedWeights(serving, merges=merges)
    for weights, trained in (stock.adapter(1), stock.adapter(2, rank=8, alpha=4.0), stock.adapter(3, seed=7)):
        exchange = served.take(held(weights, trained))
        assert (exchange.adapter is None) == merges
        served.apply(exchange)
        assert torch.allclose(logits(trained), logits(serving), atol=CLOSE)


def test_an_adapter_in_memory_of_another_model_is_refused(stock: Stock) -> None:
    _, serving = stock.base()
    weights, trained = stock.adapter(1)
    adapter = held(weights, trained)
    other = replace(adapter, tensors={f"{name}.more": tensor for name, tensor in adapter.tensors.items()})
    with pytest.raises(ConfigError, match=r"does not fit the model.*Serve the model that the adapter was trained on"):
        ServedWeights(serving).take(other)


def test_whole_weights_from_memory_replace_an_adapter_and_its_base(stock: Stock) -> None:
    _, serving = stock.base()
    served = ServedWeights(serving)
    adapter, trained = stock.adapter(1)
    served.apply(served.read(adapter))
    _, other = stock.base(3)
    served.apply(served.whole(other.model.state_dict()))
    assert torch.equal(logits(other), logits(serving))
    served.apply(served.read(adapter))
    assert torch.allclose(logits(trained), logits(serving), atol=CLOSE)


def changed(weights: Weights, *, config: dict[str, object]) -> Weights:
    """Return a copy of an adapter on disk with some fields of its configuration changed."""
    folder = Path(f"{weights.uri}-changed")
    shutil.copytree(weights.uri, folder, ignore=shutil.ignore_patterns("checksums.sha256"))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return Weights(uri=str(folder), base_model=weights.base_model, format="lora")


@pytest.mark.parametrize("config", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 64}}, {"use_dora": False}])
def test_settings_of_an_adapter_are_heeded(stock: Stock, config: dict[str, object]) -> None:
    from peft import PeftModel

    weights = changed(stock.adapter(1)[0], config=config)
    _, serving = stock.base()
    served = ServedWeights(serving)
    served.apply(served.read(weights))
    _, base = stock.base()
    meant = LoadedModel(
        name="", model=PeftModel.from_pretrained(base.model, weights.uri), tokenizer=None, device=base.device
    )
    assert torch.allclose(logits(meant), logits(serving), atol=CLOSE)


def test_an_adapter_that_is_more_than_pairs_is_merged_into_its_base(stock: Stock) -> None:
    from peft import LoraConfig, get_peft_model

    weights, serving = stock.base()
    _, loaded = stock.base()
    torch.manual_seed(1)
    adapted = get_peft_model(loaded.model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    trained = LoadedModel(name=weights.uri, model=adapted.eval(), tokenizer=loaded.tokenizer, device=loaded.device)
    served = ServedWeights(serving)
    exchange = served.read(save_served(trained, Path(weights.uri).with_name("more")))
    assert exchange.adapter is None
    served.apply(exchange)
    assert torch.allclose(logits(trained), logits(serving), atol=CLOSE)


@pytest.mark.parametrize("more", [{"use_dora": True}, {"modules_to_save": ["norm"]}], ids=["dora", "modules"])
def test_an_adapter_in_memory_that_is_more_than_pairs_is_served_as_it_trains(
    stock: Stock, more: dict[str, Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    weights, serving = stock.base()
    _, loaded = stock.base()
    torch.manual_seed(1)
    adapted = get_peft_model(loaded.model, LoraConfig(r=4, target_modules=["q_proj"], **more)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    trained = LoadedModel(name=weights.uri, model=adapted, tokenizer=loaded.tokenizer, device=loaded.device)
    before = logits(trained)
    served = ServedWeights(serving)
    served.apply(served.take(trained))
    assert torch.allclose(before, logits(serving), atol=CLOSE)
    assert torch.equal(before, logits(trained))


def test_a_bfloat16_base_keeps_the_small_parts_of_an_adapter(stock: Stock) -> None:
    weights, trained = stock.adapter(1)
    with torch.no_grad():
        for name, parameter in trained.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-3)
    weights = save_served(trained, Path(weights.uri).with_name("small"))
    _, serving = stock.base()
    serving.model.to(torch.bfloat16)
    before = logits(serving)
    served = ServedWeights(serving)
    served.apply(served.read(weights))
    assert not torch.equal(before, logits(serving))
    assert torch.allclose(logits(trained), logits(serving).float(), atol=0.05)


def test_an_adapter_for_another_model_is_refused_and_the_one_before_stays(stock: Stock, tmp_path: Path) -> None:
    _, serving = stock.base()
    served = ServedWeights(serving)
    weights, trained = stock.adapter(1)
    served.apply(served.read(weights))
    narrow = Weights(uri=weights.uri, base_model=str(tmp_path / "nowhere"), format="lora")
    with pytest.raises(ConfigError, match="nowhere"):
        served.read(narrow)
    assert torch.allclose(logits(trained), logits(serving), atol=CLOSE)


@pytest.mark.parametrize("merges", [False, True])
def test_adapter_in_memory_is_served_as_the_one_on_disk(stock: Stock, merges: bool) -> None:
    _, base = stock.base()
    weights, adapted = stock.adapter(1)
    one, other = copy.deepcopy(base), copy.deepcopy(base)
    from_disk, from_memory = ServedWeights(one, merges=merges), ServedWeights(other, merges=merges)
    from_disk.apply(from_disk.read(weights))
    from_memory.apply(from_memory.take(adapted))
    expected = logits(one)
    assert not torch.equal(logits(base), expected)
    assert torch.equal(expected, logits(other))

    with torch.no_grad():  # training goes on, and what serves does not change with it
        for parameter in adapted.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(expected, logits(other))


def test_master_in_memory_is_served_in_the_type_that_it_computes_in(stock: Stock, tmp_path: Path) -> None:
    weights, base = stock.base()
    master = load_model(weights.uri, device="cpu", dtype="bfloat16", is_master=True)
    with torch.no_grad():
        for parameter in master.model.parameters():
            parameter.add_(1e-4)
    one, other = copy.deepcopy(base), copy.deepcopy(base)
    from_disk, from_memory = ServedWeights(one), ServedWeights(other)
    from_disk.apply(from_disk.read(save_served(master, tmp_path / "master")))
    from_memory.apply(from_memory.take(master))
    assert torch.equal(logits(one), logits(other))
    assert not torch.equal(logits(base), logits(other))
