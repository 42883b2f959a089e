"""What algorithms measured of versions, kept beside them: a version never changes, and what is known of it grows.

`agl show` and `agl resources list` print it. What an algorithm measures again replaces what it measured before.
"""

from collections.abc import Mapping

import msgspec

from agl.contracts import Store
from agl.schemas import Record

_PREFIX = "score/"


class VersionScore(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A mean reward with its 95 % interval.

    Attributes:
        mean: Mean reward.
        low: Lower end of the interval; ``high`` its upper end.
        n: Tasks that were measured.
        how: Which rewards these are, such as ``fresh rollouts``, or ``selection`` for those by which the version was
            chosen among others, which flatter the chosen one.
    """

    mean: float
    low: float
    high: float
    n: int
    how: str

    @property
    def words(self) -> str:
        """The score as a person reads it."""
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] n={self.n} ({self.how})"


async def save_scores(store: Store, scores: Mapping[tuple[str, str], VersionScore]) -> None:
    """Keep the scores of versions, by (resource, version); replaces what was kept of them."""
    if scores:
        await store.save_state({_key(*owner): msgspec.json.encode(score) for owner, score in scores.items()})


async def scores_of(store: Store, name: str) -> dict[str, VersionScore]:
    """The scores of a resource's versions, by version; without those that were never measured."""
    prefix = _key(name, "")
    states = await store.load_state(prefix)
    return {key.removeprefix(prefix): msgspec.json.decode(data, type=VersionScore) for key, data in states.items()}


def _key(name: str, version: str) -> str:
    return f"{_PREFIX}{name}/{version}"
