"""What this distribution registers; nothing here imports verl or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import AlgorithmEntry, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl
def agl_algorithms() -> Iterable[AlgorithmEntry]:
    """VERL's policy-gradient training, configured by VERL's own keys."""
    yield AlgorithmEntry(
        name="verl",
        factory="agl_algo_verl.inproc:VERL",
        summary="policy gradients with VERL's engine, losses and advantages (GRPO, RLOO, REINFORCE++, GSPO)",
        tunes=("weights",),
    )
