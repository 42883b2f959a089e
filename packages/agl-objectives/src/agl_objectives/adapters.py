"""LoRA adapters in memory, which an algorithm that trains them passes to a policy that serves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["HeldAdapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAdapter:
    """A LoRA adapter to serve on top of its unchanged base model.

    Source: LoRA, Hu et al. 2021, arXiv 2106.09685, section 4.1.

    Attributes:
        base: Directory or hub name of the base model.
        config: The content of peft's `adapter_config.json`.
        tensors: The matrices A [rank, in] and B [out, rank] of each layer under peft's names, such as
            `base_model.model.LAYER.lora_A.weight`. They are copies, which no update changes.
    """

    base: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
