"""AdamW whose two moments take 8 bits a weight instead of 32 (Dettmers et al. 2021, arXiv 2110.02861).

A moment is stored in blocks of 256 numbers: the largest magnitude of the block in float32, and a code per number. Each
update decodes a moment, applies AdamW in float32, and encodes it again. Two things differ from the paper:

- Codes are logarithmic: neighbouring codes differ by 7 %, over 12 octaves for the first moment and 24 for the second,
  whose root divides the first. A second moment below that range is rounded up, never to 0, so that no weight jumps.
- Codes are rounded by a threshold that moves through [0, 1) from update to update, in steps of the golden ratio. A
  moment that decays by less than half the distance of two codes would otherwise never change. The threshold depends
  only on the number of the update, so a resumed run repeats it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_BLOCK = 256
_GOLDEN = 0.6180339887498949

_AT_ONCE = 2**20
"""Number of weights that are updated at once; their moments are in float32 meanwhile."""

_SCALE = "_scale"


class _Code(NamedTuple):
    """A code of one moment: `levels` magnitudes over `octaves`, the smallest of them `least` for a number above 0."""

    dtype: torch.dtype
    levels: int
    octaves: int
    least: int


_CODES = {"exp_avg": _Code(torch.int8, 127, 12, 0), "exp_avg_sq": _Code(torch.uint8, 255, 24, 1)}


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2017) with moments in 8 bits; the arguments are those of `torch.optim.AdamW`."""

    def __init__(self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closures here
        """Do one update of every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in _CODES:
                state |= _encode(name, _flat(torch.zeros_like(parameter, dtype=torch.float32)))
        state["step"] += 1
        weights, slopes = _flat(parameter.detach()), _flat(parameter.grad)
        for start in range(0, len(weights), _AT_ONCE):
            own = slice(start, start + _AT_ONCE)
            blocks = slice(start // _BLOCK, (start + _AT_ONCE) // _BLOCK)
            part = {name: state[name][own] for name in _CODES}
            part |= {name + _SCALE: state[name + _SCALE][blocks] for name in _CODES}
            _move(weights[own], slopes[own].float(), part, group, update=int(state["step"]))
        if not parameter.is_contiguous():  # then `weights` is a copy
            parameter.copy_(weights.view(parameter.shape))


def _move(weights: Tensor, slopes: Tensor, state: dict[str, Tensor], group: dict[str, Any], *, update: int) -> None:
    """Update some weights and their moments in place."""
    first, second = group["betas"]
    mean = _decode("exp_avg", state).lerp_(slopes, 1 - first)  # m <- b1 m + (1 - b1) g
    square = _decode("exp_avg_sq", state).mul_(second).addcmul_(slopes, slopes, value=1 - second)
    for name, values in (("exp_avg", mean), ("exp_avg_sq", square)):
        for key, tensor in _encode(name, values, threshold=update * _GOLDEN % 1).items():
            state[key].copy_(tensor)
    weights.mul_(1 - group["lr"] * group["weight_decay"])
    # w <- w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    root = square.div_(1 - second**update).sqrt_().add_(group["eps"])
    weights.addcdiv_(mean, root, value=-group["lr"] / (1 - first**update))


def _encode(name: str, values: Tensor, *, threshold: float = 0.5) -> dict[str, Tensor]:
    """Return the codes of a moment and the scale of each block, under the names that a state has for them."""
    code = _CODES[name]
    padded = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
    scale = padded.abs().amax(dim=1)
    size = padded.abs().div_(scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None])
    # 1 -> levels, 2^-octaves -> 1
    level = size.log2_().mul_((code.levels - 1) / code.octaves).add_(code.levels + threshold)
    level = level.floor_().clamp_(code.least, code.levels).mul_(padded.sign())
    return {name: level.view(-1)[: len(values)].to(code.dtype), name + _SCALE: scale}


def _decode(name: str, state: dict[str, Tensor]) -> Tensor:
    """Return a moment in float32."""
    code, level = _CODES[name], state[name].float()
    size = level.abs().sub_(code.levels).mul_(code.octaves / (code.levels - 1)).exp2_().mul_(level.sign())
    return size.mul_(state[name + _SCALE].repeat_interleave(_BLOCK)[: len(size)])


def converted(state: dict[str, Tensor], parameter: Tensor, *, is_8bit: bool) -> dict[str, Tensor]:
    """Return a parameter's moments as an optimizer keeps them: in 8 bits, or in the parameter's shape in float32."""
    has_8bit = "exp_avg" + _SCALE in state
    if has_8bit == is_8bit:
        return state
    if has_8bit:
        return {name: _decode(name, state).view(parameter.shape) for name in _CODES}
    return {key: value for name in _CODES for key, value in _encode(name, _flat(state[name])).items()}


def _flat(values: Any) -> Tensor:
    return values.reshape(-1)
