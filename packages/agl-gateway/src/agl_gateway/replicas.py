"""Chooses the server of a policy for each rollout, and avoids servers that failed recently.

All calls of a rollout go to one server, because that one has the rollout's prompt prefixes cached. The choice is
rendezvous hashing (Thaler and Ravishankar 1998): servers rank by a hash of rollout and address. So a server that
leaves or returns moves only its own rollouts, and all gateways choose alike without talking to each other.
"""

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

_REST_S = 5.0
"""Seconds for which a failed server ranks last."""


class Replicas:
    """The servers of one policy, at least one. Used in one event loop only.

    Attributes:
        rerouted: Number of calls that another server took over.
    """

    def __init__(self, base_urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._base_urls = tuple(base_urls)
        self._clock = clock
        self._failed_at: dict[str, float] = {}
        self.rerouted = 0

    def __len__(self) -> int:
        return len(self._base_urls)

    def ranked(self, rollout_id: str) -> list[str]:
        """Return the base URLs in the order to try them: the rollout's own first, recently failed ones last."""
        if len(self._base_urls) == 1:
            return [*self._base_urls]
        ranked = sorted(self._base_urls, key=lambda base_url: _rank(rollout_id, base_url))
        return sorted(ranked, key=self._is_resting)

    def failed(self, url: str) -> None:
        """Record that the server of ``url`` did not answer; it ranks last for a while."""
        for base_url in self._base_urls:
            if url.startswith(f"{base_url}/"):
                self._failed_at[base_url] = self._clock()

    def _is_resting(self, base_url: str) -> bool:
        return self._clock() - self._failed_at.get(base_url, float("-inf")) < _REST_S


def _rank(rollout_id: str, base_url: str) -> bytes:
    return blake2b(f"{rollout_id}\n{base_url}".encode(), digest_size=8).digest()
