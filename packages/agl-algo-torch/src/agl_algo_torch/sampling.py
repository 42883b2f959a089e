"""One sampling step for a batch whose rows have different parameters, on transformers' own warpers.

The log-probability that is reported, and trained on, is `log_softmax(logits / temperature)` before top-k and top-p:
with temperature 1 (and for greedy decoding) it is the model's own. Where top-k or top-p cut the distribution the
response says that the reported one is not exactly the one that was sampled from (`is_exact`).

Rows without a seed draw from one generator of the engine; rows with a seed from their own, so that a seeded
request repeats whatever else runs. The global random state, which training uses, is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from agl_algo_torch.typed_torch import integers, numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a token is drawn; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 switch the cut off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    top_logprobs: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def is_exact(self) -> bool:
        """Whether tokens are drawn from exactly the distribution whose log-probabilities are reported."""
        return not self.is_greedy and self.top_p >= 1.0 and self.top_k == 0

    @property
    def logprobs_mode(self) -> str:
        """Which logits the reported log-probabilities come from."""
        is_raw = self.is_greedy or self.temperature == 1.0
        return "raw_logprobs" if is_raw else "temperature_scaled_logprobs"

    @property
    def shape(self) -> tuple[float, float, int]:
        """What rows must share to be processed together."""
        return self.temperature, self.top_p, self.top_k


@dataclass(frozen=True, slots=True)
class Draw:
    """The token drawn for one row, its log-probability and the requested alternatives as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def draw(
    logits_B_V: Tensor,
    params: Sequence[SamplingParams],
    *,
    generators: Sequence[Generator | None],
    shared: Generator,
) -> list[Draw]:
    """Draw one token per row; raises FloatingPointError when the logits are not finite."""
    logits = logits_B_V.float()
    if not bool(torch.isfinite(logits.amax(-1)).all()):  # amax carries NaN and +inf; -inf is a masked token
        raise FloatingPointError("the model's logits are not finite; its weights have probably diverged")
    draws: dict[int, Draw] = {}
    for rows in _by_shape(params):
        part = logits if len(rows) == len(params) else logits[rows]
        drawn = _draw_alike(part, [params[i] for i in rows], [generators[i] for i in rows], shared)
        draws.update(zip(rows, drawn, strict=True))
    return [draws[i] for i in range(len(params))]


def _by_shape(params: Sequence[SamplingParams]) -> list[list[int]]:
    groups: dict[tuple[float, float, int], list[int]] = {}
    for row, one in enumerate(params):
        groups.setdefault(one.shape, []).append(row)
    return list(groups.values())


def _draw_alike(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[Generator | None], shared: Generator
) -> list[Draw]:
    """Draw for rows of equal temperature, top-p and top-k; logits (rows, vocabulary)."""
    first = params[0]
    scaled = logits
    if not first.is_greedy and first.temperature != 1.0:
        scaled = _warp([TemperatureLogitsWarper(first.temperature)], logits)
    logprobs = scaled.log_softmax(-1)
    tokens = logits.argmax(-1) if first.is_greedy else _multinomial(_probabilities(scaled, first), generators, shared)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    tops = _alternatives(logprobs, params)
    return [
        Draw(token, logprob, top) for token, logprob, top in zip(integers(tokens), numbers(chosen), tops, strict=True)
    ]


def _probabilities(scaled: Tensor, params: SamplingParams) -> Tensor:
    warpers: list[Any] = []
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    return _warp(warpers, scaled).softmax(-1)


def _warp(warpers: list[Any], scores: Tensor) -> Tensor:
    """Apply warpers; none of those used here looks at the tokens so far."""
    if not warpers:
        return scores
    no_tokens = torch.empty((scores.shape[0], 0), dtype=torch.long, device=scores.device)
    return LogitsProcessorList(warpers)(cast("Any", no_tokens), cast("Any", scores))


def _multinomial(probabilities: Tensor, generators: Sequence[Generator | None], shared: Generator) -> Tensor:
    free = [row for row, generator in enumerate(generators) if generator is None]
    if len(free) == len(generators):
        return torch.multinomial(probabilities, 1, generator=shared)[:, 0]
    tokens = torch.empty(len(generators), dtype=torch.long, device=probabilities.device)
    if free:
        tokens[free] = torch.multinomial(probabilities[free], 1, generator=shared)[:, 0]
    for row, generator in enumerate(generators):
        if generator is not None:
            tokens[row] = torch.multinomial(probabilities[row], 1, generator=generator)[0]
    return tokens


def _alternatives(logprobs: Tensor, params: Sequence[SamplingParams]) -> list[tuple[tuple[int, float], ...]]:
    most = min(max(one.top_logprobs for one in params), logprobs.shape[-1])
    if most == 0:
        return [()] * len(params)
    values, ids = logprobs.topk(most, dim=-1)
    rows = zip(cast("list[list[int]]", integers(ids)), cast("list[list[float]]", numbers(values)), strict=True)
    return [
        tuple(zip(row_ids[: one.top_logprobs], row_values[: one.top_logprobs], strict=True))
        for one, (row_ids, row_values) in zip(params, rows, strict=True)
    ]
