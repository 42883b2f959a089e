"""Wraps functions of torch whose annotations are incomplete, and adds nothing else to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

_torch: Any = torch


def unique(values: Tensor, *, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the sorted distinct values (or slices along `dim`) and, for each value, its index among them."""
    return _torch.unique(values, dim=dim, return_inverse=True)


def integers(values: Tensor) -> list[int]:
    """Return a vector of integers as Python numbers."""
    return cast("Any", values).tolist()


def floats(values: Tensor) -> list[float]:
    """Return a vector of floats as Python numbers."""
    return cast("Any", values).tolist()
