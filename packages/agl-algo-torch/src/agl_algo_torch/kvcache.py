"""Key/value memory of a batch whose rows come and go, and of prefixes that conversations share.

`BatchCache` is a transformers `Cache`, so any causal LM with ordinary attention writes into it unchanged.
All rows end at one common column (they are padded on the left), therefore a decoding step writes one column for
every row with a single slice, nothing is concatenated, and a row leaves by letting the last row take its place.

    columns      start            end   capacity
    row 0   . . . . [k k k k k k k k]. . . .
    row 1   . . . . . . . [k k k k k]. . . .

Limits: layers that keep a state other than one key and one value per token (state-space models, linear attention)
are refused by `check_supported`; the attention of a short row reads masked columns up to the longest row.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from agl.errors import ConfigError
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    TokenArray = npt.NDArray[np.int32]

_HEADROOM = 256
"""Spare columns after a re-allocation, so that it happens about once per 256 decoding steps."""

_BLOCK = 16
"""Tokens per link of the hash chain that finds shared prefixes."""

KeyValues = list[tuple["Tensor", "Tensor"]]
"""Per layer the keys and values of one row, each (heads, tokens, head_dim)."""


class _Window:
    """Where the rows of a batch lie in the buffers; shared by all layers of one cache."""

    def __init__(self) -> None:
        self.rows = 0
        self.start = 0
        self.end = 0

    @property
    def width(self) -> int:
        return self.end - self.start


class _Layer(CacheLayerMixin):
    """One layer's buffers, each (row capacity, heads, column capacity, head_dim)."""

    def __init__(self, window: _Window) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - untyped in transformers
        self.window = window
        self.capacity = (0, 0)
        self.k: Tensor
        self.v: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, columns = self.capacity
        self.k = key_states.new_zeros((rows, key_states.shape[1], columns, key_states.shape[3]))
        self.v = value_states.new_zeros((rows, value_states.shape[1], columns, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window, end = self.window, self.window.end + key_states.shape[2]
        self.k[: window.rows, :, window.end : end] = key_states
        self.v[: window.rows, :, window.end : end] = value_states
        return (
            self.k[: window.rows, :, window.start : end],
            self.v[: window.rows, :, window.start : end],
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.width + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.width

    def get_max_length(self) -> int:
        return -1

    def resize(self, capacity: tuple[int, int], *, source: slice, target: slice) -> None:
        """Move the window's columns `source` to `target` in buffers of the new capacity."""
        self.capacity = capacity
        if not self.is_initialized:
            return
        old_k, old_v, rows = self.k, self.v, self.window.rows
        self.lazy_initialization(old_k, old_v)
        self.k[:rows, :, target] = old_k[:rows, :, source]
        self.v[:rows, :, target] = old_v[:rows, :, source]


class BatchCache(Cache):
    """Keys and values of all running rows; used by one thread.

    Attributes:
        lengths: Tokens held per row; row `i` lies in the columns `end - lengths[i]` to `end`.
    """

    def __init__(self, *, n_layers: int) -> None:
        self._window = _Window()
        self._layers = [_Layer(self._window) for _ in range(n_layers)]
        super().__init__(layers=cast("Any", list(self._layers)))
        self.lengths: list[int] = []

    @property
    def width(self) -> int:
        """Columns that attention reads: the length of the longest row."""
        return self._window.width

    def begin(self, rows: Sequence[KeyValues | None], *, new_tokens: int) -> None:
        """Make room for one forward pass of `new_tokens` columns over rows that may start with a prefix."""
        longest = max((row[0][0].shape[1] for row in rows if row is not None), default=0)
        self._resize(rows=len(rows), longest=longest, extra=new_tokens)
        for row in rows:
            self.add([row] if row is not None else [])

    def add(self, parts: Sequence[KeyValues]) -> None:
        """Append a row made of the concatenated `parts`; the caller's tensors are copied."""
        length = sum(part[0][0].shape[1] for part in parts)
        window, row = self._window, len(self.lengths)
        rows_capacity = self._layers[0].capacity[0]
        if length > window.end or row >= rows_capacity:
            rows = rows_capacity if row < rows_capacity else max(8, 2 * row)
            self._resize(rows=rows, longest=max(length, window.width))
        window.rows = row + 1
        self.lengths.append(length)
        window.start = min(window.start, window.end - length)
        column = window.end - length
        for part in parts:
            column = self._write(part, row=row, column=column)

    def _write(self, part: KeyValues, *, row: int, column: int) -> int:
        end = column + part[0][0].shape[1]
        for layer, (keys, values) in zip(self._layers, part, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            layer.k[row, :, column:end] = keys
            layer.v[row, :, column:end] = values
        return end

    def reserve(self, new_tokens: int) -> None:
        """Make sure that the next forward pass has `new_tokens` free columns."""
        rows, columns = self._layers[0].capacity
        if self._window.end + new_tokens > columns:
            self._resize(rows=max(rows, len(self.lengths)), longest=self.width, extra=new_tokens)

    def _resize(self, *, rows: int, longest: int, extra: int = 0) -> None:
        window = self._window
        source = slice(window.start, window.end)
        target = slice(longest - window.width, longest)
        for layer in self._layers:
            layer.resize((rows, longest + extra + _HEADROOM), source=source, target=target)
        window.start, window.end = target.start, target.stop

    def advance(self, new_tokens: int) -> None:
        """Count the columns that a forward pass has just written, for every row."""
        self._window.end += new_tokens
        self.lengths = [length + new_tokens for length in self.lengths]

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its index."""
        last, window = len(self.lengths) - 1, self._window
        if row != last:
            columns = slice(window.end - self.lengths[last], window.end)
            for layer in self._layers:
                layer.k[row, :, columns] = layer.k[last, :, columns]
                layer.v[row, :, columns] = layer.v[last, :, columns]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        window.rows = last
        window.start = window.end - max(self.lengths, default=0)

    def row(self, row: int, *, tokens: int) -> KeyValues:
        """Views of the last `tokens` columns of a row; copy them before the next change."""
        columns = slice(self._window.end - tokens, self._window.end)
        return [(layer.k[row, :, columns], layer.v[row, :, columns]) for layer in self._layers]

    def mask(self, new_tokens: Sequence[int], *, pad_to: int, device: torch.device) -> Tensor:
        """Attention mask (rows, width + pad_to) of a pass where row `i` brings its last `new_tokens[i]` tokens."""
        columns = torch.arange(self.width + pad_to, device=device)
        held = torch.tensor(self.lengths, device=device)[:, None]
        new = torch.tensor(new_tokens, device=device)[:, None]
        is_held = (columns >= self.width - held) & (columns < self.width)
        return is_held | (columns >= self.width + pad_to - new)


@dataclass(slots=True)
class _Prefix:
    """One remembered sequence: its tokens, its hash chain and its keys and values."""

    tokens: TokenArray
    chain: list[int]
    key_values: KeyValues
    n_bytes: int


class PrefixStore:
    """Keys and values of recent sequences, found by the longest shared prefix; least recently used leave first.

    Args:
        max_bytes: Memory that may be kept; 0 turns the store off.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._entries: OrderedDict[int, _Prefix] = OrderedDict()
        self._owner: dict[int, int] = {}
        self._next_id = 0

    def find(self, tokens: TokenArray) -> tuple[int, KeyValues | None]:
        """Longest usable prefix of `tokens`, at most all but the last one, as (tokens, key values)."""
        for link in reversed(list(_chain(tokens))):
            entry_id = self._owner.get(link)
            if entry_id is not None:
                return self._use(entry_id, tokens)
        return 0, None

    def _use(self, entry_id: int, tokens: TokenArray) -> tuple[int, KeyValues | None]:
        self._entries.move_to_end(entry_id)
        entry = self._entries[entry_id]
        shared = min(_shared(entry.tokens, tokens), len(tokens) - 1)
        if shared <= 0:
            return 0, None
        return shared, [(keys[:, :shared], values[:, :shared]) for keys, values in entry.key_values]

    def add(self, tokens: TokenArray, key_values: KeyValues) -> None:
        """Remember a sequence; the tensors are copied. One already covered by another is not stored again."""
        chain = list(_chain(tokens))
        if not chain or self._max_bytes == 0 or self._covers(chain[-1], tokens):
            return
        kept = [(keys.clone(), values.clone()) for keys, values in key_values]
        n_bytes = sum(t.numel() * t.element_size() for pair in kept for t in pair)
        self._entries[self._next_id] = _Prefix(tokens, chain, kept, n_bytes)
        self._owner.update(dict.fromkeys(chain, self._next_id))
        self._next_id += 1
        self._n_bytes += n_bytes
        while self._n_bytes > self._max_bytes:
            self._evict()

    def _covers(self, link: int, tokens: TokenArray) -> bool:
        entry_id = self._owner.get(link)
        return entry_id is not None and _shared(self._entries[entry_id].tokens, tokens) == len(tokens)

    def _evict(self) -> None:
        entry_id, entry = self._entries.popitem(last=False)
        self._n_bytes -= entry.n_bytes
        for link in entry.chain:
            if self._owner.get(link) == entry_id:
                del self._owner[link]

    def clear(self) -> None:
        """Forget everything; due whenever the weights change."""
        self._entries.clear()
        self._owner.clear()
        self._n_bytes = 0


def _chain(tokens: TokenArray) -> Iterator[int]:
    link = 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        link = hash((link, tokens[end - _BLOCK : end].tobytes()))
        yield link


def _shared(left: TokenArray, right: TokenArray) -> int:
    """Length of the common prefix."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


def check_supported(config: Any) -> int:
    """Number of attention layers of a model; raises ConfigError for a model whose state is not keys and values."""
    probe = cast("list[object]", DynamicCache(config=config).layers)
    strange = sorted({type(layer).__name__ for layer in probe if type(layer) not in _PLAIN})
    if strange or not probe:
        raise ConfigError(
            f"The embedded server cannot batch model type {config.model_type!r}: its cache has {strange or 'no layers'}, "
            "and only plain and sliding-window attention can be served while requests come and go. "
            "Serve it with vLLM and point the policy at that endpoint."
        )
    return len(probe)


_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)


def has_sliding_window(config: Any) -> bool:
    """Whether some layer sees only the latest tokens; then a hole between prefix and new tokens would shift it."""
    probe = cast("list[object]", DynamicCache(config=config).layers)
    return any(isinstance(layer, DynamicSlidingWindowLayer) for layer in probe)
