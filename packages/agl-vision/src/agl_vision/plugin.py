"""Registers the modality of transformers' processors, without importing transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import hookimpl
from agl.contracts import ModalityEntry

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl
def agl_modalities() -> Iterable[ModalityEntry]:
    """Yield the modality for all models whose processor transformers has."""
    yield ModalityEntry(
        name="transformers",
        factory="agl_vision.modality:TransformersVision",
        summary="pictures as the model's processor in transformers reads them",
    )
