"""Wrappers with complete type annotations for functions of torch and parts of VERL; they do nothing else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

_torch: Any = torch


def verl_part(path: str) -> Any:
    """Import a module and return one of its attributes, both named by `path` as `module:attribute`.

    Call `runtime.prepare` before requesting a part of VERL.
    """
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def from_bytes(data: bytes, kind: str) -> Tensor:
    """Return packed numbers as a tensor with its own memory; `kind` is the numbers' numpy type, such as `<i4`."""
    return _torch.from_numpy(np.frombuffer(data, dtype=kind).copy())


def half_bytes(values: Tensor) -> bytes:
    """Return numbers on the CPU as packed little-endian float16, clipped to ±65,504."""
    most = torch.finfo(torch.float16).max
    return cast("Any", values.clamp(-most, most)).numpy().astype("<f2").tobytes()


def ragged(parts: list[Tensor]) -> Tensor:
    """Return vectors of different lengths as one jagged tensor."""
    return _torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def floats(values: Tensor) -> list[float]:
    """Return a vector as Python floats."""
    return cast("Any", values).tolist()


def integers(values: Tensor) -> list[int]:
    """Return a vector of integers as Python ints."""
    return cast("Any", values).tolist()
