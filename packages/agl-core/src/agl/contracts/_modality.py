"""The contract of modalities, which turn pictures into the tokens and the tensors that one family of models reads."""

from collections.abc import Sequence
from typing import Any, Protocol

from agl.schemas import Blob, MediaSpan


class Modality(Protocol):
    """Reads pictures as the processor of one model does. All methods may be called in any thread, by several at once.

    A picture's span goes from its first placeholder to its last; marks between them, such as those of tiles, lie inside
    the span, and marks around it outside. The grid of a span is the modality's own.
    """

    @property
    def processor(self) -> str:
        """Name and version of the processor, and a hash of its settings: ``Qwen2VLProcessor 5.23.0 1a2b3c4d``."""
        ...

    @property
    def banned(self) -> frozenset[int]:
        """Token ids that stand for pictures, which a policy must never sample."""
        ...

    def expand(self, ids: Sequence[int], blobs: Sequence[Blob]) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """Replace the one placeholder of each picture by all of its tokens; returns the new ids and the spans in order.

        Raises:
            ValueError: A picture cannot be read, or the number of placeholders is not that of the pictures.
        """
        ...

    def spans(self, ids: Sequence[int], blobs: Sequence[Blob]) -> tuple[MediaSpan, ...]:
        """Find the spans of the pictures in ids that another server has expanded.

        Raises:
            ValueError: A picture cannot be read, or the ids are not those of ``expand``.
        """
        ...

    def features(self, blobs: Sequence[Blob], spans: Sequence[MediaSpan]) -> dict[str, Any]:
        """Return the arguments with which the model's forward pass gets these pictures, one blob for each span.

        Names and tensors are those of the processor. Without pictures there are none.
        """
        ...

    def positions(self, ids: Sequence[int], spans: Sequence[MediaSpan]) -> Any:
        """Return the position ids of a sequence, a tensor ``[dimensions, tokens]``; None for plain positions.

        It is None for every sequence or for none. Tokens after the sequence continue at the largest position plus 1.
        """
        ...
