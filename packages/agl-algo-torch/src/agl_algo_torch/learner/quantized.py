"""Holds the frozen base of LoRA adapters in 4 bits (QLoRA: Dettmers et al. 2023, arXiv 2305.14314, section 3).

A block of 64 weights is stored as its largest magnitude, in float32, and 64 codes of 4 bits. A code stands for one of
16 levels, which are quantiles of the normal distribution (NF4). Together they take 0.5625 bytes per weight. A layer
computes its weights in the type of its input, in the forward and again in the backward pass, and does not keep them.

Deviation from the paper: the magnitudes are not quantised again, which would save another 0.05 bytes per weight.
The embedding, the head and layers whose size is not a multiple of 64 stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from agl_algo_torch.learner.typed_torch import modules

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 64
"""Weights that share one magnitude."""

_MOST = 0.5 * ((1 - 1 / 30) + (1 - 1 / 32))
"""Largest quantile, equation 4 of the paper; it becomes the level 1."""


def levels() -> Tensor:
    """Return the 16 levels of NF4 from -1 to 1, [16] float32; one of them is 0."""
    quantiles = cast("Any", torch.special).ndtri
    above: Tensor = quantiles(torch.linspace(0.5, _MOST, 9, dtype=torch.float64))
    below: Tensor = -quantiles(torch.linspace(_MOST, 0.5, 8, dtype=torch.float64))[:-1]
    return (torch.cat([below, above]) / above[-1]).float()


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weights are stored in 4 bits; `weight` has their codes, two in a byte.

    It stays an `nn.Linear`, so peft adapts it like any other.
    """

    def __init__(self, layer: nn.Linear, *, device: torch.device) -> None:
        sizes: Any = (layer.in_features, layer.out_features)
        super().__init__(*sizes, bias=False, device="meta")  # pyright: ignore[reportUnknownMemberType] - torch's stub
        codes, scale = _quantized(layer.weight.detach().to(device))
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("scale", scale)
        self.scale: Tensor

    def full(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that the codes stand for, [out, in]."""
        level = levels().to(self.weight.device, dtype)
        pairs = torch.stack([level.repeat_interleave(16), level.repeat(16)], dim=1)  # [256, 2], the levels of a byte
        blocks = nn.functional.embedding(self.weight.int(), pairs).view(-1, BLOCK)
        return (blocks * self.scale.to(dtype)[:, None]).view(self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input W^T + b`."""
        product = cast("Tensor", cast("Any", _Product).apply(input, self))
        return product if self.bias is None else product + self.bias  # pyright: ignore[reportUnnecessaryComparison]


class _Product(torch.autograd.Function):
    """Multiplies by the weights of a layer, and computes them again for the gradient instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        values, layer = given
        ctx.layer = layer
        return values @ layer.full(values.dtype).T

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        return slopes[0] @ ctx.layer.full(slopes[0].dtype), None


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, [n / 2] uint8, and the blocks' magnitudes, [n / 64] float32, of n weights."""
    blocks = weight.float().reshape(-1, BLOCK)
    scale = blocks.abs().amax(1)
    level = levels().to(weight.device)
    borders = (level[1:] + level[:-1]) / 2
    codes = torch.bucketize(blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None], borders)
    codes = codes.to(torch.uint8).view(-1, 2)
    return codes[:, 0] * 16 + codes[:, 1], scale


@torch.no_grad()
def quantize(model: nn.Module, *, device: torch.device) -> None:
    """Replace the linear layers of a Hugging Face causal LM, except the head, by quantised ones on `device`."""
    head = cast("Any", model).get_output_embeddings()
    for parent, name, layer in list(_children(model)):
        if type(layer) is nn.Linear and layer is not head and layer.weight.numel() % BLOCK == 0:
            setattr(parent, name, QuantizedLinear(layer, device=device))


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for _, parent in modules(model):
        for name, layer in parent.named_children():
            yield parent, name, layer


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantised layers of a model by name; empty for a model without any."""
    return {name: layer for name, layer in modules(model) if isinstance(layer, QuantizedLinear)}
