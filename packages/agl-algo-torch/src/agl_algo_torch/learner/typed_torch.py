"""Wraps functions of torch and safetensors whose annotations are incomplete, and adds nothing else to them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import safetensors.torch
import torch
import torch.utils.checkpoint as checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from torch import Tensor, nn

_torch: Any = torch
_files: Any = safetensors.torch
_checkpoints: Any = checkpoints

T = TypeVar("T")


def from_bytes(data: bytes, *, kind: str, dtype: torch.dtype) -> Tensor:
    """Return packed numbers as a tensor that owns its memory; `kind` is the numbers' numpy type, such as `<i4`."""
    return _torch.from_numpy(np.frombuffer(data, dtype=kind).copy()).to(dtype)


def half_bytes(values: Tensor) -> bytes:
    """Return a tensor on the CPU as packed little-endian float16, clamped to the range of +-65,504."""
    most = torch.finfo(torch.float16).max
    return cast("Any", values.clamp(-most, most)).numpy().astype("<f2").tobytes()


def numbers(values: Tensor) -> list[float]:
    """Return a vector of floats as Python numbers."""
    return cast("Any", values).tolist()


def integers(values: Tensor) -> list[int]:
    """Return a vector of integers as Python numbers."""
    return cast("Any", values).tolist()


def backward(loss: Tensor) -> None:
    """Add the gradient of `loss` to the parameters."""
    cast("Any", loss).backward()


def split(values: Tensor, size: int) -> list[Tensor]:
    """Split a tensor along its first dimension into parts of at most `size`; at least one part."""
    return list(cast("Any", values).split(size))


def split_sizes(values: Tensor, sizes: Sequence[int], *, dim: int = 0) -> list[Tensor]:
    """Split a tensor along the dimension `dim` into parts of the given sizes."""
    return list(cast("Any", values).split(list(sizes), dim=dim))


def recomputed(function: Callable[..., T], *inputs: object) -> T:
    """Return `function(*inputs)`; the backward pass computes the intermediate tensors again instead of keeping them."""
    return cast("T", _checkpoints.checkpoint(function, *inputs, use_reentrant=False))


def seed_everything(seed: int) -> None:
    """Seed torch's global generator, from which the initialisation of layers draws."""
    _torch.manual_seed(seed)


@contextmanager
def seeded(seed: int, *, device: torch.device) -> Generator[None]:
    """Seed torch's global generators for the block, and restore their state afterwards."""
    with _torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        _torch.manual_seed(seed)
        yield


def modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a model with their names, the model itself first."""
    return list(cast("Any", model).named_modules())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file to the CPU."""
    return _files.load_file(path)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; no two tensors may share memory."""
    _files.save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
