"""Stores computed keys and values for later prompts with the same prefix.

Turns of a conversation, siblings of a group and tasks with one system prompt share long prefixes. A prefix is found
through a chain of hashes, one per block of tokens, and then compared token by token, so a collision costs time but
never gives a wrong answer. The contents belong to one version of the weights: clear them when the weights change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agl_algo_torch.serving.kvcache import KeyValues, TokenArray

_BLOCK = 16
"""Tokens per link of the hash chain."""


@dataclass(slots=True)
class _Prefix:
    """One stored sequence: its tokens, hash chain, keys and values, and their size in bytes."""

    tokens: TokenArray
    chain: list[int]
    key_values: KeyValues
    n_bytes: int


class PrefixStore:
    """The keys and values of recent sequences, found by the longest common prefix.

    The least recently used sequences are removed first.

    Args:
        max_bytes: Limit on the memory of the keys and values; 0 turns the store off.

    Attributes:
        is_on: False if the store is off; it then finds nothing.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.is_on = max_bytes > 0
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._entries: OrderedDict[int, _Prefix] = OrderedDict()
        self._owner: dict[int, int] = {}  # for each link the newest entry that contains it
        self._next_id = 0

    def find(self, tokens: TokenArray) -> tuple[int, KeyValues | None]:
        """Return the longest stored prefix of `tokens` as (number of tokens, keys and values), or (0, None).

        The prefix never contains the last of the tokens, because its logits must be computed. The tensors are
        views: copy them before the store changes.
        """
        # A later link covers a longer prefix, so the first hit from the end is the best.
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
        return shared, [tensor[:, :, :shared] for tensor in entry.key_values]

    def add(self, tokens: TokenArray, key_values: KeyValues) -> None:
        """Store a sequence and copies of its tensors, unless it is shorter than a block or prefix of a stored one."""
        chain = list(_chain(tokens))
        if not chain or not self.is_on or self._covers(chain[-1], tokens):
            return
        kept = [tensor.clone() for tensor in key_values]
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)
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
        """Remove all sequences; call this whenever the weights change."""
        self._entries.clear()
        self._owner.clear()
        self._n_bytes = 0


def _chain(tokens: TokenArray) -> Iterator[int]:
    """Yield a hash for each whole block, over all tokens up to its end; equal hashes almost always mean equal
    prefixes.
    """
    link = 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        link = hash((link, tokens[end - _BLOCK : end].tobytes()))
        yield link


def _shared(left: TokenArray, right: TokenArray) -> int:
    """Return the number of tokens in the common prefix of two sequences."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    first = int(differs.argmax()) if size else 0  # the first difference, or 0 when there is none
    return first if size and differs[first] else size
