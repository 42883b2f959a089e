"""Reads pictures with the processor that transformers has for a model's family, on Pillow and without torchvision.

The processor is asked about one picture at a time: its tokens replace the picture's placeholder, and its tensors are
cached by the picture's digest. So nothing here knows the form of a family's tokens (a run of equal placeholders, or
tiles with marks between them), or which tensors its model takes. Positions are computed here, because every model of
transformers that has three-dimensional ones leaves them in its own state.

Limits: pictures only, no video and no sound. Models whose pictures attend in both directions are refused.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from agl.errors import ConfigError
from agl.schemas import MediaSpan
from agl_vision.pictures import decode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.schemas import Blob

_CACHE_BYTES = 256 * 2**20

_VISION = ("image", "video", "vision", "fake_image", "global_image")
"""Beginnings of the names of picture tokens in configurations and processors, as in `vision_start_token_id`."""


_hf = cast("Any", transformers)  # whose classes take untyped settings


@dataclass(frozen=True, slots=True)
class _Picture:
    """One processed picture: its tokens, the part of them that its span covers, its grid and its tensors."""

    ids: tuple[int, ...]
    start: int
    stop: int
    grid: tuple[int, ...]
    tensors: Mapping[str, Tensor]

    def span(self, offset: int, blob: Blob) -> MediaSpan:
        """Return the span of the picture if its tokens begin at `offset`."""
        length = self.stop - self.start
        return MediaSpan(
            offset=offset + self.start, length=length, modality="image", digest=blob.digest, grid=self.grid
        )


class TransformersVision:
    """The role `Modality` for a model of transformers.

    Args:
        model: Directory or hub name, with the files of the model's tokenizer and processor.

    Raises:
        ConfigError: transformers has no processor for the model, or the model's pictures attend in both directions.
    """

    def __init__(self, *, model: str) -> None:
        self._config = _hf.AutoConfig.from_pretrained(model)
        self._processor = _processor(model, self._config)
        self._placeholder = int(self._processor.image_token_id)
        self._merge = _merge(self._config)
        self.processor = _name(self._processor)
        marks = {
            *getattr(self._processor, "row_col_ids", ()),
            *_vision_ids(self._config),
            *_vision_ids(self._processor),
        }
        self.banned = frozenset(marks - {None, self._processor.tokenizer.unk_token_id})
        self._work, self._lock = threading.Lock(), threading.Lock()  # of the processor, and of the cache
        self._cache: OrderedDict[str, _Picture] = OrderedDict()
        self._n_bytes = 0

    def expand(self, ids: Sequence[int], blobs: Sequence[Blob]) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """See `Modality`."""
        places = [place for place, token in enumerate(ids) if token == self._placeholder]
        if len(places) != len(blobs):
            raise ValueError(
                f"The prompt has {len(places)} placeholders {self._processor.image_token!r} for {len(blobs)} pictures. "
                "Remove the placeholder from the messages' text, or put the pictures into messages of the role user: "
                "the chat template may leave out those of other roles."
            )
        found: list[int] = []
        spans: list[MediaSpan] = []
        read = 0
        for place, blob in zip(places, blobs, strict=True):
            picture = self._picture(blob)
            found += ids[read:place]
            spans.append(picture.span(len(found), blob))
            found += picture.ids
            read = place + 1
        return [*found, *ids[read:]], tuple(spans)

    def spans(self, ids: Sequence[int], blobs: Sequence[Blob]) -> tuple[MediaSpan, ...]:
        """See `Modality`."""
        spans: list[MediaSpan] = []
        at = 0
        for blob in blobs:
            picture = self._picture(blob)
            at = next((i for i in range(at, len(ids)) if ids[i] == self._placeholder), len(ids)) - picture.start
            if tuple(ids[max(at, 0) : at + len(picture.ids)]) != picture.ids:
                raise ValueError(f"The ids have other tokens for a picture than {self.processor} makes of it.")
            spans.append(picture.span(at, blob))
            at += len(picture.ids)
        if self._placeholder in ids[at:]:
            raise ValueError(f"The ids have more placeholders than those of {len(blobs)} pictures.")
        return tuple(spans)

    def features(self, blobs: Sequence[Blob], spans: Sequence[MediaSpan]) -> dict[str, Any]:
        """See `Modality`."""
        pictures = [self._picture(blob) for blob in blobs]
        names = pictures[0].tensors if pictures else ()
        return {name: _joined([picture.tensors[name] for picture in pictures]) for name in names}

    def positions(self, ids: Sequence[int], spans: Sequence[MediaSpan]) -> Tensor | None:
        """See `Modality`. The dimensions are time, height and width (Qwen2-VL, arXiv 2409.12191, section 2.1)."""
        if not self._merge:
            return None
        positions = torch.arange(len(ids)).repeat(3, 1)
        for span in spans:
            end = span.offset + span.length
            time, height, width = span.grid[0], span.grid[1] // self._merge, span.grid[2] // self._merge
            start = int(positions[0, span.offset])
            cells = torch.cartesian_prod(torch.arange(time), torch.arange(height), torch.arange(width))
            positions[:, span.offset : end] = cells.T + start
            positions[:, end:] = torch.arange(len(ids) - end) + start + max(height, width)
        return positions

    def _picture(self, blob: Blob) -> _Picture:
        with self._lock:
            found = self._cache.get(blob.digest)
            if found is not None:
                self._cache.move_to_end(blob.digest)
                return found
        with self._work:  # a fast tokenizer must not change while another thread uses it
            made = self._processed(blob)
        with self._lock:
            if blob.digest not in self._cache:
                self._cache[blob.digest] = made
                self._n_bytes += _size(made)
            while self._n_bytes > _CACHE_BYTES and len(self._cache) > 1:
                self._n_bytes -= _size(self._cache.popitem(last=False)[1])
        return made

    def _processed(self, blob: Blob) -> _Picture:
        given: dict[str, Any] = {"text": [self._processor.image_token], "images": [decode(blob.data)]}
        found = self._processor(**given, add_special_tokens=False, return_tensors="pt")
        ids = cast("list[int]", found.pop("input_ids")[0].tolist())
        tensors = {name: tensor for name, tensor in found.items() if name not in _OF_TEXT}
        grid = tensors["image_grid_thw"][0].tolist() if "image_grid_thw" in tensors else tensors["pixel_values"].shape
        start, stop = ids.index(self._placeholder), len(ids) - ids[::-1].index(self._placeholder)
        return _Picture(tuple(ids), start, stop, tuple(grid), tensors)


_OF_TEXT = ("attention_mask", "mm_token_type_ids")
"""Outputs of processors that describe the tokens and not the pictures."""

_TWINS = {"SmolVLMProcessor": "Idefics3Processor"}
"""Processors that need packages for videos, and others that read pictures equally."""


def _processor(model: str, config: Any) -> Any:
    """Return the family's processor, without the part for videos, which needs torchvision."""
    if type(config) not in _hf.PROCESSOR_MAPPING:
        raise ConfigError(
            f"transformers has no processor for {model!r} ({config.model_type}), so it reads no pictures."
        )
    name = str(_hf.PROCESSOR_MAPPING[type(config)].__name__)
    kind = getattr(_hf, _TWINS.get(name, name))
    forward: Any = _hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].forward
    if "token_type_ids" in inspect.signature(forward).parameters:
        raise ConfigError(
            f"The pictures of {model!r} ({config.model_type}) attend in both directions, which is not supported. "
            "Use a model of another family, such as Qwen2-VL or SmolVLM."
        )
    reads = type(name, (kind,), {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])})
    # The name in `transformers` itself asks for torchvision in releases before 5.23.
    image_processor = cast("Any", AutoImageProcessor).from_pretrained(model, backend="pil")
    tokenizer = _hf.AutoTokenizer.from_pretrained(model)
    return reads(image_processor=image_processor, tokenizer=tokenizer, **_settings(model, kind))


def _settings(model: str, kind: Any) -> dict[str, Any]:
    """Return the processor's own settings, such as the number of tokens of a tile."""
    held, _ = kind.get_processor_dict(model)
    known = inspect.signature(kind).parameters
    return {name: value for name, value in held.items() if name in known and isinstance(value, int)}


def _name(processor: Any) -> str:
    held = cast("dict[str, Any]", vars(processor))
    settings = {name: value for name, value in held.items() if isinstance(value, int | str)}
    text = json.dumps([settings, processor.image_processor.to_dict()], sort_keys=True, default=str)
    return f"{type(processor).__name__} {transformers.__version__} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _vision_ids(source: Any) -> set[int]:
    held = cast("dict[str, Any]", vars(source))
    named = {name: value for name, value in held.items() if name.startswith(_VISION)}
    return {value for name, value in named.items() if name.endswith("_token_id") and isinstance(value, int)}


def _merge(config: Any) -> int:
    """Return how many patches a token covers in each direction, or 0 for a family with plain positions."""
    rope: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return int(config.vision_config.spatial_merge_size) if "mrope_section" in rope else 0


def _joined(tensors: list[Tensor]) -> Tensor:
    """Join the tensors of several pictures; those of tiles have a batch of one as their first dimension."""
    return torch.cat(tensors, dim=1 if tensors[0].ndim >= _TILED and tensors[0].shape[0] == 1 else 0)


_TILED = 4
"""Fewest dimensions of tensors of tiles: a batch, the tiles, their height and width."""


def _size(picture: _Picture) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in picture.tensors.values())
