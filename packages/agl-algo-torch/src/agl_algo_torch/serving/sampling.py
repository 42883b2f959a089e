"""Draws one token per row for a batch whose rows have different parameters, with transformers' own warpers.

The reported log-probability, which training uses, is `log_softmax(logits / temperature)` before top-k and top-p. With
temperature 1 and in greedy decoding it is `log_softmax(logits)`. If top-k or top-p cut the distribution, the response
says that the reported log-probabilities are not exactly those of the sampling distribution (`is_exact`).

A token is drawn by inverting the cumulative distribution at one uniform number, which comes from the row's own stream
of random numbers. A row's tokens therefore depend only on its seed and its logits, not on other requests. The global
random state, which training uses, is never touched.

B is the number of rows, V the size of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from agl_algo_torch.learner.typed_torch import integers, numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one sequence."""

    temperature: float = 1.0  # tau; 0 is greedy decoding
    top_p: float = 1.0  # keeps the smallest set of likeliest tokens with this probability; 1 keeps all
    top_k: int = 0  # keeps this number of likeliest tokens; 0 keeps all
    seed: int | None = None  # None takes the next seed of the engine
    top_logprobs: int = 0  # number of alternatives to report per token

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken, without sampling."""
        return self.temperature == 0.0

    @property
    def is_exact(self) -> bool:
        """True if tokens are drawn from exactly the distribution whose log-probabilities are reported."""
        # Importance weights divide by the reported probability, so a trainer must know if it is not the sampler's.
        return not self.is_greedy and self.top_p >= 1.0 and self.top_k == 0

    @property
    def logprobs_mode(self) -> str:
        """vLLM's name for the log-probabilities that are reported: those of raw or of temperature-scaled logits."""
        is_raw = self.is_greedy or self.temperature == 1.0
        return "raw_logprobs" if is_raw else "temperature_scaled_logprobs"

    @property
    def shape(self) -> tuple[float, float, int]:
        """The parameters that must be equal in rows that are drawn together."""
        return self.temperature, self.top_p, self.top_k


@dataclass(frozen=True, slots=True)
class Draw:
    """The token drawn for one row, its log-probability in nats, and the requested alternatives as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def draw(logits_B_V: Tensor, params: Sequence[SamplingParams], *, uniforms: Sequence[float]) -> list[Draw]:
    """Draw one token per row; `uniforms` has a random number for each row, from 0 inclusive to 1 exclusive.

    Raises FloatingPointError if the logits are not finite.
    """
    logits = logits_B_V.float()  # [B, V]; a sum over the vocabulary needs more than bfloat16's 8 bits
    draws: dict[int, Draw] = {}
    # A call of the warpers has one temperature, top-k and top-p, so rows with equal parameters are drawn together.
    for rows in _by_shape(params):
        part = logits if len(rows) == len(params) else logits[rows]
        drawn = _draw_alike(part, [params[i] for i in rows], [uniforms[i] for i in rows])
        draws.update(zip(rows, drawn, strict=True))
    return [draws[i] for i in range(len(params))]


def _by_shape(params: Sequence[SamplingParams]) -> list[list[int]]:
    """Return the row indices grouped by `shape`, in order of first appearance."""
    groups: dict[tuple[float, float, int], list[int]] = {}
    for row, one in enumerate(params):
        groups.setdefault(one.shape, []).append(row)
    return list(groups.values())


def _draw_alike(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[Draw]:
    """Draw a token for each of several rows with the same temperature, top-p and top-k; `logits` is [B, V]."""
    first = params[0]
    scaled = logits
    # z / tau. Greedy decoding is the limit tau -> 0, where everything but the maximum would get log-probability
    # -inf; it reports the model's own distribution instead.
    if not first.is_greedy and first.temperature != 1.0:
        scaled = _warp([TemperatureLogitsWarper(first.temperature)], logits)
    logprobs = scaled.log_softmax(-1)  # [B, V], before any cut
    tokens = logits.argmax(-1) if first.is_greedy else _inverse(_probabilities(scaled, first), uniforms)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]  # [B], log p of the token that was drawn
    tops = _alternatives(logprobs, params)
    # Both in one tensor, because a GPU finishes its queue before each transfer; a float64 holds every id exactly.
    drawn = cast("list[list[float]]", numbers(torch.stack([tokens.double(), chosen.double()], dim=1)))
    # A row with a logit of NaN or +inf has no finite log-probability; -inf alone is just a masked token.
    if not all(math.isfinite(logprob) for _, logprob in drawn):
        raise FloatingPointError("the model's logits are not finite; its weights have probably diverged")
    return [Draw(int(token), logprob, top) for (token, logprob), top in zip(drawn, tops, strict=True)]


def _probabilities(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities to draw from, [B, V]: softmax of `scaled` after top-k, then top-p."""
    warpers: list[Any] = []
    # Top-k first, as transformers and vLLM do: top-p then counts the mass of what top-k has left.
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    return _warp(warpers, scaled).softmax(-1)


def _warp(warpers: list[Any], scores: Tensor) -> Tensor:
    """Return `scores` after applying the warpers, [B, V]."""
    if not warpers:
        return scores
    # The interface of warpers takes the tokens so far, but the warpers used here ignore them.
    no_tokens = torch.empty((scores.shape[0], 0), dtype=torch.long, device=scores.device)
    return LogitsProcessorList(warpers)(cast("Any", no_tokens), cast("Any", scores))


def _inverse(probabilities: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return the first token of each row at which the cumulative sum exceeds the row's uniform number, [B]."""
    # In float64: rounding would move the borders of unlikely tokens by more than their probability.
    cumulative = probabilities.double().cumsum(-1)  # [B, V]
    total = cumulative[:, -1:]  # [B, 1], 1 up to rounding
    wanted = torch.tensor(uniforms, dtype=torch.float64, device=probabilities.device)[:, None] * total
    # Below the total, or no token would exceed it. `right` passes over tokens of probability 0, which add nothing.
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    first = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return first.clamp(max=probabilities.shape[1] - 1)  # without finite probabilities it would be past the last token


def _alternatives(logprobs: Tensor, params: Sequence[SamplingParams]) -> list[tuple[tuple[int, float], ...]]:
    """Return for each row the `top_logprobs` most likely tokens as (id, logprob), most likely first."""
    # One top-k for the largest number requested; rows that request fewer use its first entries.
    most = min(max(one.top_logprobs for one in params), logprobs.shape[-1])
    if most == 0:
        return [()] * len(params)
    values, ids = logprobs.topk(most, dim=-1)  # [B, most] both
    rows = zip(cast("list[list[int]]", integers(ids)), cast("list[list[float]]", numbers(values)), strict=True)
    return [
        tuple(zip(row_ids[: one.top_logprobs], row_values[: one.top_logprobs], strict=True))
        for one, (row_ids, row_values) in zip(params, rows, strict=True)
    ]
