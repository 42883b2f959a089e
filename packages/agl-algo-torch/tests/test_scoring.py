"""Log-probabilities and entropies in chunks of positions are those from all logits at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, GraniteConfig
from transformers import GraniteForCausalLM as Granite

from agl_algo_torch.learner import scoring
from agl_algo_torch.learner.batch import MicroBatch, from_tokens, micro_batches
from agl_algo_torch.learner.model import add_lora, computing, load_model
from agl_algo_torch.learner.scoring import (
    Scores,
    entropy,
    find_head,
    has_plain_head,
    policy_entropy,
    token_logprobs,
    whole_logits,
)
from agl_objectives.settings import Lora

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def batch_of(*, rows: int = 5, length: int = 12, vocabulary: int = 60) -> MicroBatch:
    """Return rows of several lengths and temperatures, in which about a third of the tokens train."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(rows):
        size = length - number
        ids = torch.randint(vocabulary, (size,), generator=generator).tolist()
        row = from_tokens(f"r{number}", ids, [int(place % 3 == 1) for place in range(size)])
        samples.append(replace(row, temperature=torch.linspace(0.5, 1.5, size)))
    (batch,) = micro_batches(samples, [1.0] * rows, token_budget=10_000, device=torch.device("cpu"))
    return batch


def from_whole_logits(batch: MicroBatch, model: Any) -> Scores:
    with computing(model):
        logits_M_V = batch.run(whole_logits(model))
    return Scores(
        logp_M=token_logprobs(logits_M_V, targets_M=batch.targets_M, temperature_M=batch.temperature_M),
        entropy_M=entropy(logits_M_V),
        bonus_M=policy_entropy(logits_M_V, temperature_M=batch.temperature_M),
    )


def gradient(model: Any, scores: Scores) -> dict[str, torch.Tensor]:
    model.zero_grad()
    assert scores.bonus_M is not None
    slope_M = torch.sin(torch.arange(len(scores.logp_M)).float())  # each token pulls with a factor of its own
    (slope_M * scores.logp_M + 0.3 * scores.bonus_M).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: Any, batch: MicroBatch, *, tolerance: float) -> None:
    expected = from_whole_logits(batch, model)
    slopes = gradient(model, expected)
    found = batch.scores(model, has_entropy=True, has_bonus=True)
    for name in ("logp_M", "entropy_M", "bonus_M"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=tolerance, atol=tolerance)
    own = gradient(model, found)
    assert own.keys() == slopes.keys()
    for name, slope in slopes.items():
        assert float((own[name] - slope).norm()) <= tolerance * max(1.0, float(slope.norm())), name


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a chunk seven positions long."""
    monkeypatch.setattr(scoring, "FEWEST_POSITIONS", 7)
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 0)


@pytest.mark.usefixtures("small_chunks")
def test_chunks_score_like_all_logits_at_once(make_loaded: Callable[..., Any]) -> None:
    model = make_loaded().model
    assert find_head(model) == ""
    assert_same(model, batch_of(), tolerance=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head")])
def test_chunks_score_like_all_logits_at_once_under_lora(
    targets: tuple[str, ...], make_loaded: Callable[..., Any]
) -> None:
    loaded = make_loaded()
    if "lm_head" in targets:  # an adapter of the head alone
        loaded.model.lm_head.weight = torch.nn.Parameter(loaded.model.lm_head.weight.detach().clone())
        loaded.model.config.tie_word_embeddings = False
    model: Any = add_lora(loaded.model, Lora(rank=4, targets=targets))
    for name, p in model.named_parameters():
        if "lora_B" in name:  # it begins at zero, where one half of the gradient is zero too
            torch.nn.init.normal_(p, std=0.02)
    assert find_head(model) == ""
    assert_same(model, batch_of(), tolerance=1e-6)


@pytest.mark.usefixtures("small_chunks")
def test_chunks_score_like_all_logits_at_once_in_bfloat16(model_dir: Path) -> None:
    model = load_model(str(model_dir), device="cpu", dtype="bfloat16", is_master=True).model
    assert find_head(model) == ""
    assert_same(model, batch_of(), tolerance=2.0**-7)


def test_no_tensor_holds_more_logits_than_a_chunk_has(
    make_loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "FEWEST_POSITIONS", 100)
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 0)
    model = make_loaded().model
    find_head(model)
    batch = batch_of(rows=20, length=60)
    vocabulary = model.config.vocab_size
    assert len(batch.targets_M) > 3 * 100

    class Sizes(TorchDispatchMode):
        logits = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.shape[-1:] == (vocabulary,) and made.ndim > 1:
                Sizes.logits = max(Sizes.logits, made.numel())
            return made

    with Sizes():
        scores = batch.scores(model, has_entropy=True, has_bonus=True)
        gradient(model, scores)
    assert Sizes.logits == 100 * vocabulary  # the weights of the head are smaller


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)), id="cap"),
        pytest.param(lambda: Granite(GraniteConfig(**SIZES, logits_scaling=3.0)), id="scale"),
        pytest.param(lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.2)), id="logit-scale"),
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_a_model_that_changes_its_logits_runs_as_a_whole_and_says_so(model: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    made = model().eval()
    assert "holds the logits of all its tokens" in find_head(made)
    assert not has_plain_head(made)
    assert_same(made, batch_of(), tolerance=1e-6)


@pytest.mark.usefixtures("small_chunks")
def test_no_trained_token_has_no_scores_and_a_gradient_of_zero(make_loaded: Callable[..., Any]) -> None:
    model = make_loaded().model
    find_head(model)
    samples = [from_tokens("r", [1, 2, 3], [1, 0, 0])]
    (batch,) = micro_batches(samples, [1.0], token_budget=9, device=torch.device("cpu"))
    logp_M = batch.logprobs(model)
    assert logp_M.shape == (0,)
    logp_M.sum().backward()
    assert not model.lm_head.weight.grad.any()
