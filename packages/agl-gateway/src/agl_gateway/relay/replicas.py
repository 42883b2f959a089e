"""Chooses the server of a policy for each call: the rollout's own, unless that one has failed or has too much to do.

All calls of a rollout go to one server, because that one has the rollout's prompt prefixes cached. The choice is
rendezvous hashing (Thaler and Ravishankar 1998): servers rank by a hash of rollout and address. So a server that
leaves or returns moves only its own rollouts, and all gateways choose alike without talking to each other. A server
that has far more calls under way than the others passes calls on to the rollout's next one, as in consistent hashing
with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350). Each gateway counts its own calls only.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

_REST_S = 5.0
"""Seconds for which a failed server ranks last."""

_SLACK = 1.25
"""Share of the mean number of calls under way up to which a server keeps its rollouts."""

_FEW = 4
"""Calls under way up to which a server keeps its rollouts however idle the others are."""


class Replicas:
    """The servers of one policy, at least one. Used in one event loop only.

    Attributes:
        rerouted: Number of calls that another server took over.
    """

    def __init__(self, base_urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._base_urls = tuple(base_urls)
        self._clock = clock
        self._failed_at: dict[str, float] = {}
        self._under_way: Counter[str] = Counter()
        self.rerouted = 0

    def __len__(self) -> int:
        return len(self._base_urls)

    def ranked(self, rollout_id: str) -> list[str]:
        """Return the base URLs in the order to try: the rollout's own first, busy and recently failed ones last."""
        if len(self._base_urls) == 1:
            return [*self._base_urls]
        bound = max(_FEW, math.ceil(_SLACK * (self._under_way.total() + 1) / len(self._base_urls)))
        ranked = sorted(self._base_urls, key=lambda base_url: _rank(rollout_id, base_url))
        return sorted(ranked, key=lambda base_url: (self._is_resting(base_url), self._under_way[base_url] >= bound))

    @contextmanager
    def under_way(self, url: str) -> Generator[None]:
        """Count a call to ``url`` as under way at its server."""
        base_url = self._base_of(url)
        self._under_way[base_url] += 1
        try:
            yield
        finally:
            self._under_way[base_url] -= 1

    def failed(self, url: str) -> None:
        """Record that the server of ``url`` did not answer; it ranks last for a while."""
        self._failed_at[self._base_of(url)] = self._clock()

    def _base_of(self, url: str) -> str:
        return next((base_url for base_url in self._base_urls if url.startswith(f"{base_url}/")), url)

    def _is_resting(self, base_url: str) -> bool:
        return self._clock() - self._failed_at.get(base_url, float("-inf")) < _REST_S


def _rank(rollout_id: str, base_url: str) -> bytes:
    return blake2b(f"{rollout_id}\n{base_url}".encode(), digest_size=8).digest()
