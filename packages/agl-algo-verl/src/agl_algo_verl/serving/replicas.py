"""Chooses the replica for each call: the one that has read the conversation so far, unless it is too busy.

A replica that has read the start of a prompt answers sooner. A call is taken to continue or repeat an earlier one if
its first messages are all of the earlier call's messages. Rollouts of one task open with the same call, so they share a
replica too. An opening that tasks merely have in common, such as a system prompt, does not count; then the replica with
the fewest calls in flight is chosen. A replica that is busier than the others passes on even known conversations.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from agl.served_calls import ServerLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REMEMBERED = 65_536
"""The maximum number of calls for which the answering replica is remembered."""


class Balance:
    """Remembers the prompts that each replica has read; used in one event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.load = ServerLoad(clock=clock)
        self._readers: OrderedDict[bytes, str] = OrderedDict()
        self._chosen: Counter[str] = Counter()
        self._urls: frozenset[str] = frozenset()

    def ranked(self, urls: Sequence[str], opening: Sequence[bytes]) -> list[str]:
        """Return the replicas' URLs in the order in which to try them for a call.

        Args:
            urls: The current replicas, at least one.
            opening: The `digests` of the call's messages; empty if it has none.
        """
        if frozenset(urls) != self._urls:  # a new replica would get every call until it has had as many as the others
            self._urls = frozenset(urls)
            self._chosen.clear()
        load = self.load
        ranked = sorted(urls, key=lambda url: (load.is_resting(url), load.in_flight[url], self._chosen[url]))
        reader = next((self._readers[digest] for digest in reversed(opening) if digest in self._readers), "")
        if reader in self._urls and not load.is_resting(reader) and reader not in load.busy(urls):
            ranked.remove(reader)
            ranked.insert(0, reader)
        return ranked

    def answered(self, url: str, opening: Sequence[bytes]) -> None:
        """Record that the replica at `url` has answered a call whose messages have these digests."""
        self._chosen[url] += 1
        for digest in opening[-1:]:
            self._readers[digest] = url
            self._readers.move_to_end(digest)
        if len(self._readers) > REMEMBERED:
            self._readers.popitem(last=False)


def digests(messages: Sequence[bytes]) -> list[bytes]:
    """Return the digest of every non-empty prefix of the messages, the shortest first."""
    state, digests = blake2b(digest_size=16), list[bytes]()
    for message in messages:
        state.update(len(message).to_bytes(8, "big"))
        state.update(message)
        digests.append(state.digest())
    return digests
