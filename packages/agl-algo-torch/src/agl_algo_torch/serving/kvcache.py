"""Holds the keys and values of a batch whose rows are added and removed between tokens.

`BatchCache` is a transformers `Cache`, so any causal LM with ordinary attention writes into it unchanged.
All rows are padded on the left and end at one common column. A decoding step therefore writes one column for all rows
with a single slice and concatenates nothing. When a row is removed, the last row moves to its index.

    columns      start            end   capacity
    row 0   . . . . [k k k k k k k k]. . . .
    row 1   . . . . . . . [k k k k k]. . . .

Limits: `CacheLayout.of` refuses layers whose state is anything but one key and one value per token (state-space models,
linear attention). The attention of a short row also reads masked columns, as many as the longest row has.
`engine` decides which rows are added and removed.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

    TokenArray = npt.NDArray[np.int32]

_HEADROOM = 256
"""Spare columns after a re-allocation, so that a re-allocation is needed about every 256 decoding steps."""

_SPARE = 4
"""Upper bound on the ratio of allocated to needed buffer cells, where a cell is one column of one row."""

KeyValues = list["Tensor"]
"""Keys and values of one row: one tensor per buffer, [tensors in the buffer, heads, tokens, head_dim]."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Assigns the keys and values of a model's layers to buffers; tensors of one shape share a buffer.

    Because of this, a single copy per buffer moves a row.

    Attributes:
        stores: For each buffer: the number of tensors in it, and their heads and head_dim.
        places: For each layer the positions of the keys and of the values, each as (buffer, index in the buffer).
        dtype: Type of all buffers.
        device: Device of all buffers.
    """

    stores: tuple[tuple[int, int, int], ...]
    places: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module) -> CacheLayout:
        """Return the layout for a model, found by running one token; raises ConfigError if it cannot be batched."""
        caller = cast("Any", model)
        layers = _probe(caller)
        counts: dict[tuple[int, int], int] = {}  # tensors by (heads, head_dim)
        seen: list[list[tuple[tuple[int, int], int]]] = []  # per layer, for keys and values: their shape and index
        for pair in layers:
            seen.append([])
            for tensor in pair:
                shape = (tensor.shape[1], tensor.shape[3])  # of [rows, heads, tokens, head_dim]
                seen[-1].append((shape, counts.setdefault(shape, 0)))
                counts[shape] += 1
        order = {shape: store for store, shape in enumerate(counts)}
        return cls(
            stores=tuple((count, *shape) for shape, count in counts.items()),
            places=tuple(((order[k], k_index), (order[v], v_index)) for (k, k_index), (v, v_index) in seen),
            dtype=layers[0][0].dtype,
            device=layers[0][0].device,
        )


@torch.no_grad()
def _probe(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Run one token and return the keys and values of every layer; raises ConfigError for layers with other state."""
    config = model.config.get_text_config()
    cache = DynamicCache(config=config)
    strange = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in _PLAIN})
    if strange or not cache.layers:
        raise ConfigError(
            f"The embedded server cannot batch model type {config.model_type!r}: its cache has "
            f"{strange or 'no layers'}, and only plain and sliding-window attention can be served while requests come "
            "and go. Serve it with vLLM and point the policy at that endpoint."
        )
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(**{"input_ids": token, cache_argument(model): cache, "use_cache": True})
    return [(cast("Tensor", layer.keys), cast("Tensor", layer.values)) for layer in cast("Any", cache.layers)]


_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)


def forward_arguments(model: nn.Module) -> frozenset[str]:
    """Return the argument names of a model's forward pass; for a model with adapters, those of the base model."""
    base = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    return frozenset(inspect.signature(base.forward).parameters)


def cache_argument(model: nn.Module) -> str:
    """Return the name of the forward pass's cache argument, which is `cache` since transformers 5.24."""
    return "cache" if "cache" in forward_arguments(model) else "past_key_values"


def has_sliding_window(model: nn.Module) -> bool:
    """Return true if any layer attends to the latest tokens only.

    Such a model cannot reuse prefixes: the padding between prefix and new tokens would shift the layer's window.
    """
    probe = cast("list[object]", DynamicCache(config=cast("Any", model).config.get_text_config()).layers)
    return any(isinstance(layer, DynamicSlidingWindowLayer) for layer in probe)


class _Window:
    """The range of rows and columns that a batch occupies in the buffers; shared by all layers of one cache."""

    def __init__(self) -> None:
        self.rows = 0
        self.start = 0
        self.end = 0

    @property
    def width(self) -> int:
        return self.end - self.start


class _Layer(CacheLayerMixin):
    """One layer's views into the buffers, `k` and `v`: [row capacity, heads, column capacity, head_dim] each."""

    def __init__(self, window: _Window) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - untyped in transformers
        self.window = window
        self.k: Tensor
        self.v: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, because `BatchCache` owns the memory."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns, and return the keys and values in the window, each [rows, heads, columns, head_dim].

        The end of the window does not move here, because every layer writes the same columns; `advance` moves it.
        """
        window, end = self.window, self.window.end + key_states.shape[2]
        self.k[: window.rows, :, window.end : end] = key_states
        self.v[: window.rows, :, window.end : end] = value_states
        return self.k[: window.rows, :, window.start : end], self.v[: window.rows, :, window.start : end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that attention reads, and their offset, which is always 0."""
        return self.window.width + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of columns in the window."""
        return self.window.width

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: there is no maximum. Transformers before 5.11 calls this name."""
        return -1


class BatchCache(Cache):
    """The keys and values of all running rows; used in one thread only.

    Attributes:
        lengths: Number of tokens of each row; row `i` occupies the columns `end - lengths[i]` to `end`.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._window = _Window()
        self._views = [_Layer(self._window) for _ in layout.places]
        super().__init__(layers=list(self._views))
        self.lengths: list[int] = []
        self._capacity = (0, 0)
        self._most_cells = 0  # the largest number of cells that one `begin` needed
        self._stores: list[Tensor] = self._allocate((0, 0))

    def _allocate(self, capacity: tuple[int, int]) -> list[Tensor]:
        """Allocate buffers [tensors, row capacity, heads, column capacity, head_dim], and let the layers view them."""
        rows, columns = capacity
        layout = self._layout
        stores = [
            torch.zeros((count, rows, heads, columns, dim), dtype=layout.dtype, device=layout.device)
            for count, heads, dim in layout.stores
        ]
        for view, ((k_store, k), (v_store, v)) in zip(self._views, layout.places, strict=True):
            view.k, view.v = stores[k_store][k], stores[v_store][v]
        self._capacity = capacity
        return stores

    @property
    def width(self) -> int:
        """Number of columns that attention reads: the length of the longest row."""
        return self._window.width

    def begin(self, rows: Sequence[KeyValues | None], *, new_tokens: int) -> None:
        """Replace all rows by these prefixes (None for an empty row), with room for a pass of `new_tokens` columns.

        The memory of earlier rows is reused, because fresh memory pages would cost more time than the pass.
        """
        longest = max((row[0].shape[2] for row in rows if row is not None), default=0)
        need = (len(rows), longest + new_tokens)
        self._most_cells = max(self._most_cells, need[0] * need[1])
        self.lengths, self._window.rows = [], 0
        if need[0] > self._capacity[0] or need[1] > self._capacity[1]:
            grown = (max(need[0], self._capacity[0]), max(need[1], self._capacity[1]))
            # Otherwise a batch of many short rows and a batch of one long row would allocate many long rows.
            self._stores = self._allocate(grown if grown[0] * grown[1] <= _SPARE * self._most_cells else need)
        self._window.start = self._window.end = longest
        for row in rows:
            self.add([] if row is None else [row])

    def add(self, parts: Sequence[KeyValues]) -> None:
        """Append a row that consists of the `parts` in order; the tensors are copied."""
        length = sum(part[0].shape[2] for part in parts)
        window, row = self._window, len(self.lengths)
        # A row needs `length` columns to the left of the window's end.
        if length > window.end or row >= self._capacity[0]:
            self._resize(rows=row + 1, longest=max(length, window.width))
        window.rows = row + 1
        self.lengths.append(length)
        column = window.end - length
        window.start = min(window.start, column)
        for part in parts:
            end = column + part[0].shape[2]
            for store, tensor in zip(self._stores, part, strict=True):
                store[:, row, :, column:end] = tensor
            column = end

    def reserve(self, new_tokens: int) -> None:
        """Make room for the next forward pass, which adds `new_tokens` columns."""
        if self._window.end + new_tokens > self._capacity[1]:
            self._resize(rows=len(self.lengths), longest=self.width, extra=new_tokens)

    def _resize(self, *, rows: int, longest: int, extra: int = 0) -> None:
        """Move the window into new buffers for at least `rows` rows, so that it ends at column `longest`.

        After that column, there is room for `extra` columns of the next pass and for spare ones.
        """
        window, old, capacity = self._window, self._stores, self._capacity[0]
        # The capacity of rows at least doubles, so adding n rows one by one copies about 2 n rows in all. It shrinks
        # only if a quarter of it is enough, so a number of rows that goes up and down causes no further copies.
        if not rows <= capacity <= _SPARE * rows:
            capacity = max(8, 2 * (rows - 1))
        source = slice(window.start, window.end)
        target = slice(longest - window.width, longest)
        self._stores = self._allocate((capacity, longest + extra + _HEADROOM))
        for new, store in zip(self._stores, old, strict=True):
            new[:, : window.rows, :, target] = store[:, : window.rows, :, source]
        window.start, window.end = target.start, target.stop

    def advance(self, new_tokens: int) -> None:
        """Extend the window and every row by the columns that a forward pass has just written."""
        self._window.end += new_tokens
        self.lengths = [length + new_tokens for length in self.lengths]

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its index."""
        last, window = len(self.lengths) - 1, self._window
        if row != last:
            columns = slice(window.end - self.lengths[last], window.end)
            for store in self._stores:
                store[:, row, :, columns] = store[:, last, :, columns]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        window.rows = last
        window.start = window.end - max(self.lengths, default=0)

    def row(self, row: int, *, tokens: int) -> KeyValues:
        """Return views of the last `tokens` columns of a row; they are valid until the cache changes."""
        columns = slice(self._window.end - tokens, self._window.end)
        return [store[:, row, :, columns] for store in self._stores]

    def mask(self, new_tokens: Sequence[int], *, pad_to: int) -> Tensor:
        """Return the attention mask of a pass, [rows, width + pad_to] bool: true at a row's tokens, old and new.

        Row `i` has `new_tokens[i]` new tokens in the pass, padded to `pad_to` columns.
        """
        device = self._layout.device
        columns = torch.arange(self.width + pad_to, device=device)  # [columns]
        held = torch.tensor(self.lengths, device=device)[:, None]  # [rows, 1]
        new = torch.tensor(new_tokens, device=device)[:, None]  # [rows, 1]
        # Both parts are padded on the left:  . . . [held] . . [new]
        is_held = (columns >= self.width - held) & (columns < self.width)
        return is_held | (columns >= self.width + pad_to - new)
