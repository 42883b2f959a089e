"""Scores trained tokens, by log-probability and entropy, without ever holding the logits of a whole pass.

Logits are the largest tensors of a pass: 16,384 positions with a vocabulary of 151,936 take 9 GiB in float32, and a
loss needs several such tensors at a time. A model therefore runs up to its last hidden state. The hidden states before
trained tokens are selected, and the head turns them into logits one chunk at a time. The backward pass computes the
logits of a chunk again, so only one chunk is in memory at any time.

This is exact for a model with a plain head, which means that the model's logits are the output of its head for the last
hidden state. `find_head` tests it. Other models (with a cap or a scale on the logits) run as a whole.
M is the number of trained tokens of a micro-batch, H the width of a hidden state, V the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from agl_algo_torch.learner.model import BANNED, computing, has_lora
from agl_algo_torch.learner.typed_torch import recomputed, split

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_NEVER = -1e4
"""A logit that gives probability 0 at any temperature, and no NaN in an entropy as minus infinity would."""

_PLAIN = "agl_plain_head"
"""Name of an attribute that is true for a model with a plain head."""

FEWEST_POSITIONS = 128
"""Smallest number of positions in a chunk.

Each chunk writes a gradient of the head, V x H numbers, so small chunks cost time.
"""

CHUNK_LOGITS = 2**22
"""Number of logits in a chunk, 16 MiB in float32; with a large vocabulary, `FEWEST_POSITIONS` leads to more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores that a model gives to trained tokens, [M] each, at least float32, in nats.

    Attributes:
        logp_M: Log-probability of each token at its sampling temperature, with gradient.
        entropy_M: Entropy of the model's distribution at temperature 1, without gradient; None unless requested.
        bonus_M: Entropy of the distribution at the sampling temperature, with gradient; None unless requested.
    """

    logp_M: Tensor
    entropy_M: Tensor | None = None
    bonus_M: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The tokens to score and their sampling temperatures, [M] each; the flags say which entropies are requested."""

    targets_M: Tensor
    temperature_M: Tensor
    has_entropy: bool = False
    has_bonus: bool = False

    def of(self, logits_M_V: Tensor) -> Scores:
        """Return the scores of these tokens from the logits that predict them, [M, V]."""
        logp_M = token_logprobs(logits_M_V, targets_M=self.targets_M, temperature_M=self.temperature_M)
        bonus_M = policy_entropy(logits_M_V, temperature_M=self.temperature_M) if self.has_bonus else None
        # The entropy comes last: it has no gradient, so the backward pass skips it when it computes a chunk again.
        entropy_M = entropy(logits_M_V.detach()) if self.has_entropy else None
        return Scores(logp_M=logp_M, entropy_M=entropy_M, bonus_M=bonus_M)

    def chunks(self, size: int) -> list[Wanted]:
        """Return these tokens in chunks of at most `size` tokens; at least one chunk."""
        parts = zip(split(self.targets_M, size), split(self.temperature_M, size), strict=True)
        return [
            Wanted(targets_M=y, temperature_M=tau, has_entropy=self.has_entropy, has_bonus=self.has_bonus)
            for y, tau in parts
        ]


def score_hidden(model: nn.Module, hidden_M_H: Tensor, wanted: Wanted) -> Scores:
    """Return the scores of M tokens from the last hidden states that predict them, [M, H]; needs a plain head."""
    size = max(FEWEST_POSITIONS, CHUNK_LOGITS // int(bare(model).config.get_text_config().vocab_size))

    def score(part_H: Tensor, part: Wanted) -> Scores:
        return part.of(apply_head(model, part_H))

    parts = list(zip(split(hidden_M_H, size), wanted.chunks(size), strict=True))
    if len(parts) == 1:
        return score(*parts[0])
    return _joined([recomputed(score, *part) for part in parts])


def _joined(parts: list[Scores]) -> Scores:
    entropies = [part.entropy_M for part in parts if part.entropy_M is not None]
    bonuses = [part.bonus_M for part in parts if part.bonus_M is not None]
    return Scores(
        logp_M=torch.cat([part.logp_M for part in parts]),
        entropy_M=torch.cat(entropies) if entropies else None,
        bonus_M=torch.cat(bonuses) if bonuses else None,
    )


def apply_head(model: nn.Module, hidden_M_H: Tensor) -> Tensor:
    """Return the head's logits for M hidden states, [M, V]; needs a plain head."""
    with computing(model):
        return without_banned(model, _head(model)(hidden_M_H))


def without_banned(model: nn.Module, logits_M_V: Tensor) -> Tensor:
    """Return the logits of the policy, which never samples tokens that stand for pictures: these get probability 0."""
    banned_K = getattr(model, BANNED, None)
    return logits_M_V if banned_K is None else logits_M_V.index_fill(-1, banned_K.to(logits_M_V.device), _NEVER)


def trunk(model: nn.Module) -> Callable[..., Tensor]:
    """Return the network below the head of a Hugging Face causal LM, with adapters, as `last_hidden_states` does."""
    return last_hidden_states(bare(model).base_model)


def last_hidden_states(network: nn.Module) -> Callable[..., Tensor]:
    """Wrap a Hugging Face network in a function that maps its inputs to the last hidden states, [B, T, H]."""

    def run(**inputs: Any) -> Tensor:
        return network(**inputs).last_hidden_state

    return run


def whole_logits(model: nn.Module) -> Callable[..., Tensor]:
    """Wrap a Hugging Face causal LM in a function that maps its inputs to the logits of all tokens, [B, T, V]."""

    def run(**inputs: Any) -> Tensor:
        return model(**inputs).logits

    return run


def has_plain_head(model: nn.Module) -> bool:
    """Return true if `find_head` has found that the model has a plain head."""
    return getattr(model, _PLAIN, False)


@torch.no_grad()
def find_head(model: nn.Module) -> str:
    """Test whether a model's head is plain, and mark the model; returns `""`, or a notice to show if it is not plain.

    The output of the head is replaced in one forward pass of a few tokens. The head is plain if the model returns
    exactly this output, and if the input of the head is the output of the network below it.
    """
    is_plain = _head(model) is not None and _passes_through(model)
    setattr(model, _PLAIN, is_plain)
    if is_plain:
        return ""
    return (
        f"{type(bare(model)).__name__} makes more of its hidden states than a linear head does (such as a cap or a "
        "scale on the logits), so each forward pass holds the logits of all its tokens; lower token_budget if memory "
        "is short"
    )


def _passes_through(model: nn.Module) -> bool:
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    given: list[Tensor] = []
    returned: list[Tensor] = []

    def replace_output(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        given.append(inputs[0])
        # Larger than real logits are, so that a cap shows.
        returned.append(torch.linspace(-1000, 1000, output.shape[-1]).to(output).expand(output.shape))
        return returned[0]

    hook = _head(model).register_forward_hook(replace_output)
    try:
        with computing(model):
            logits = whole_logits(model)(input_ids=ids, use_cache=False)
            hidden = trunk(model)(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return torch.equal(returned[0], logits) and torch.allclose(given[0], hidden)


def bare(model: nn.Module) -> Any:
    """Return the Hugging Face model itself, without the wrapper of its adapters."""
    return cast("Any", model).get_base_model() if has_lora(model) else model


def _head(model: nn.Module) -> Any:
    """Return the layer that computes the logits; `None` if the model has no such layer."""
    base = bare(model)
    return base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None


def scaled(logits_M_V: Tensor, *, temperature_M: Tensor) -> Tensor:
    """Return `logits / temperature`, [M, V], at least float32."""
    # The sampler drew from softmax(z / tau), so this is the policy; with tau = 1 it is the model's own distribution.
    # bfloat16 has 8 bits of precision, too few for a log-sum over a vocabulary: compute in float32 or better.
    return logits_M_V.to(torch.promote_types(logits_M_V.dtype, torch.float32)) / temperature_M[:, None]


def token_logprobs(logits_M_V: Tensor, *, targets_M: Tensor, temperature_M: Tensor) -> Tensor:
    """Return the log-probability of each target under `softmax(logits / temperature)`, [M], at least float32."""
    scaled_M_V = scaled(logits_M_V, temperature_M=temperature_M)
    chosen_M = scaled_M_V.gather(1, targets_M[:, None])[:, 0]  # [M], z_y / tau
    # log softmax(z)_y = z_y - logsumexp(z), which needs no [M, V] tensor of log-probabilities.
    return chosen_M - scaled_M_V.logsumexp(dim=1)


def entropy(logits_M_V: Tensor) -> Tensor:
    """Return the entropy of `softmax(logits)` per position in nats, [M], without gradient.

    The sampling temperature is ignored, because this metric describes the model, not the sampler.
    """
    with torch.no_grad():
        logp_M_V = logits_M_V.float().log_softmax(dim=1)  # [M, V]
        return -logp_M_V.exp().mul_(logp_M_V).sum(dim=1)  # H = -sum_v p_v log p_v


def policy_entropy(logits_M_V: Tensor, *, temperature_M: Tensor) -> Tensor:
    """Return the entropy of `softmax(logits / temperature)`, the sampling distribution, in nats, with gradient, [M]."""
    logp_M_V = scaled(logits_M_V, temperature_M=temperature_M).log_softmax(dim=1)
    return -(logp_M_V.exp() * logp_M_V).sum(dim=1)
