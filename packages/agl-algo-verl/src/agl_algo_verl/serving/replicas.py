"""Chooses the replica for each call: the one that has read the conversation so far, unless it is too busy.

A replica that has read the start of a prompt answers sooner. A call is taken to continue or repeat an earlier one if
its first messages are all of the earlier call's messages. Rollouts of one task open with the same call, so they share a
replica too. An opening that tasks merely have in common, such as a system prompt, does not count; then the replica with
the fewest calls in flight is chosen. A replica that is busier than the others passes on even known conversations, as in
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350).
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

SLACK = 1.25
"""A replica keeps its conversations while its calls in flight stay below this multiple of the mean."""

FEW = 4
"""A replica with fewer calls in flight than this keeps its conversations, however idle the others are."""

REST_S = 5.0
"""Seconds for which a replica that could not be reached ranks last."""

REMEMBERED = 65_536
"""The number of calls whose replica is remembered."""


class Balance:
    """Tracks the prompts that each replica has read, and its calls in flight; used in one event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readers: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: Counter[str] = Counter()
        self._chosen: Counter[str] = Counter()
        self._urls: frozenset[str] = frozenset()
        self._failed_at: dict[str, float] = {}

    def ranked(self, urls: Sequence[str], opening: Sequence[bytes]) -> list[str]:
        """Return the URLs in the order in which to try them for a call.

        Args:
            urls: The current replicas, at least one.
            opening: The `digests` of the call's messages; empty if it has none.
        """
        if frozenset(urls) != self._urls:  # a new replica would get every call until it has had as many as the others
            self._urls = frozenset(urls)
            self._chosen.clear()
        ranked = sorted(urls, key=lambda url: (self._is_resting(url), self._under_way[url], self._chosen[url]))
        reader = next((self._readers[digest] for digest in reversed(opening) if digest in self._readers), "")
        if reader in self._urls and not self._is_resting(reader) and self._under_way[reader] < self._bound():
            ranked.remove(reader)
            ranked.insert(0, reader)
        return ranked

    @contextmanager
    def under_way(self, url: str) -> Generator[None]:
        """Count a call as in flight at a replica, inside the block."""
        self._under_way[url] += 1
        try:
            yield
        finally:
            self._under_way[url] -= 1

    def answered(self, url: str, opening: Sequence[bytes]) -> None:
        """Record that a replica has answered a call with these message digests."""
        self._chosen[url] += 1
        self._failed_at.pop(url, None)
        for digest in opening[-1:]:
            self._readers[digest] = url
            self._readers.move_to_end(digest)
        if len(self._readers) > REMEMBERED:
            self._readers.popitem(last=False)

    def failed(self, url: str) -> None:
        """Record that a replica could not be reached; it ranks last for 5 seconds."""
        self._failed_at[url] = self._clock()

    def _bound(self) -> int:
        under_way = sum(self._under_way[url] for url in self._urls)
        return max(FEW, math.ceil(SLACK * (under_way + 1) / len(self._urls)))

    def _is_resting(self, url: str) -> bool:
        return self._clock() - self._failed_at.get(url, -math.inf) < REST_S


def digests(messages: Sequence[bytes]) -> list[bytes]:
    """Return the digest of every non-empty prefix of the messages, the shortest first."""
    state, digests = blake2b(digest_size=16), list[bytes]()
    for message in messages:
        state.update(len(message).to_bytes(8, "big"))
        state.update(message)
        digests.append(state.digest())
    return digests
