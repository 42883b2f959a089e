"""Functions of torch and parts of VERL whose own annotations are incomplete, with complete ones and nothing else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

_torch: Any = torch


def verl_part(path: str) -> Any:
    """Return `module:attribute` of VERL, imported when it is asked for; `runtime.prepare` comes first."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def from_bytes(data: bytes, kind: str) -> Tensor:
    """Return packed numbers (`kind` is numpy's, such as `<i4`) as a tensor of its own memory."""
    return _torch.from_numpy(np.frombuffer(data, dtype=kind).copy())


def ragged(parts: list[Tensor]) -> Tensor:
    """Return vectors of several lengths as one jagged tensor."""
    return _torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def floats(values: Tensor) -> list[float]:
    """Return a vector as Python numbers."""
    return cast("Any", values).tolist()


def integers(values: Tensor) -> list[int]:
    """Return a vector of integers as Python numbers."""
    return cast("Any", values).tolist()
