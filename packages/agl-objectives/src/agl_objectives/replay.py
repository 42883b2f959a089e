"""Stores rollouts of earlier steps that may be trained once more, and chooses which of them a step replays.

A step replaces none of its own rollouts. It adds rollouts of earlier steps, up to a given share of all rollouts that it
trains on. Rollouts of the newest versions of the policy come first, and of one version those with the largest mean
|advantage|. The loss of a replayed token is multiplied by a weight, where mu is the policy that sampled the token, with
the recorded log-probability:

    c_t = min(pi_old(y_t) / mu(y_t), bound)

which is truncated importance sampling, as in IMPALA (Espeholt et al. 2018, arXiv 1802.01561, section 4.1).

A rollout is replayed at most once, at most `max_staleness` versions after the one that sampled it, and only if it had a
gradient. A replayed rollout keeps the advantages of its own step, because only that step has the whole group.

The ledger of trained rollouts has every rollout once, under the step that trained on it as its own. A replay is not in
the ledger, but in the training record of the step that replays (`agl why`) and in the metric `rollouts_replayed`. An
algorithm saves the rows with its checkpoint, so a resumed run replays the same rollouts as an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from agl.contracts import CallUse
from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from agl.schemas import Json

__all__ = ["BOUND", "MAX_STALENESS", "OldRollout", "ReplayPool", "ReplayRow", "Replayed"]

BOUND = 2.0
"""Default upper bound of the importance weights of replayed tokens."""

MAX_STALENESS = 4
"""Default of the largest staleness of a replayed rollout, in versions of the policy."""


class ReplayRow(Protocol):
    """The attributes of a row that the pool reads."""

    @property
    def rollout(self) -> str:
        """Id of the row's rollout."""
        ...

    @property
    def advantages(self) -> Tensor:
        """The advantage of every token of the row, [T]."""
        ...

    @property
    def trained(self) -> Tensor:
        """True at the trained tokens, [T] bool."""
        ...

    @property
    def is_silent(self) -> bool:
        """True if no trained token has an advantage."""
        ...


R = TypeVar("R", bound=ReplayRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRollout(Generic[R]):
    """A rollout of an earlier step.

    Attributes:
        version: Version of the policy that sampled the rollout.
        rows: The rollout's rows.
        uses: How the earlier step used the rollout's calls.
    """

    version: str
    rows: tuple[R, ...]
    uses: tuple[CallUse, ...]

    @property
    def size(self) -> float:
        """Mean |advantage| over the rollout's trained tokens."""
        own = [row.advantages[row.trained].abs() for row in self.rows]
        return sum(float(each.sum()) for each in own) / sum(map(len, own))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed(Generic[R]):
    """The rollouts that a step replays, and the staleness of each in versions of the policy."""

    rollouts: tuple[OldRollout[R], ...] = ()
    ages: tuple[int, ...] = ()

    @property
    def rows(self) -> list[R]:
        """The rows of the rollouts, in order."""
        return [row for rollout in self.rollouts for row in rollout.rows]

    def uses(self, *, bound: float) -> dict[str, tuple[CallUse, ...]]:
        """Return how the calls of replayed rollouts were used, by rollout id."""
        return {
            rollout.rows[0].rollout: tuple(_again(call, age=age, bound=bound) for call in rollout.uses)
            for rollout, age in zip(self.rollouts, self.ages, strict=True)
        }

    def metrics(self) -> dict[str, float]:
        """Return as metrics the numbers of replayed rollouts and rows, and the mean age in versions."""
        mean = sum(self.ages) / len(self.ages) if self.ages else 0.0
        return {
            "rollouts_replayed": float(len(self.rollouts)),
            "rows_replayed": float(len(self.rows)),
            "replay_staleness": mean,
        }


class ReplayPool(Generic[R]):
    """The rollouts that may be replayed.

    Args:
        algorithm: The algorithm's registered name, for messages.
        share: Share of replayed rollouts among those that a step trains on, below 1; 0 turns replay off.
        max_staleness: Largest number of versions of the policy that a replayed rollout may be behind.

    Raises:
        ConfigError: A value is out of range, or would be ignored.
    """

    def __init__(self, algorithm: str, *, share: float, max_staleness: int = MAX_STALENESS) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"{algorithm} got replay.share = {share}; it is a share, between 0 and 1.")
        if share == 1:
            raise ConfigError(f"{algorithm} got replay.share = 1, which leaves no room for new rollouts; give less.")
        if max_staleness < 1:
            raise ConfigError(f"{algorithm} got replay.max_staleness = {max_staleness}; give at least 1 version.")
        if not share and max_staleness != MAX_STALENESS:
            raise ConfigError(
                f"{algorithm} got replay.max_staleness without replay.share, so nothing is replayed. Give "
                "replay.share, or remove replay.max_staleness."
            )
        self.share = share
        self._max_staleness = max_staleness
        self._versions: list[str] = []  # the versions that sampled rollouts, oldest first
        self._kept: list[OldRollout[R]] = []

    def take(self, version: str, *, own: int) -> Replayed[R]:
        """Return the rollouts to replay in a step that has `own` rollouts of the live `version`.

        The returned rollouts are removed from the pool, and so are those that have become too old.
        """
        if not self.share:
            return Replayed()
        earlier = [each for each in self._versions if each != version]
        self._versions = [*earlier[-self._max_staleness :], version]
        self._kept = [each for each in self._kept if each.version in self._versions]
        # Rollouts of the live version are not replayed: they are on-policy still.
        old = [each for each in self._kept if each.version != version]
        old.sort(key=lambda each: (-self._versions.index(each.version), -each.size, each.rows[0].rollout))
        chosen = old[: int(own * self.share / (1 - self.share) + 0.5)]
        gone = {id(each) for each in chosen}
        self._kept = [each for each in self._kept if id(each) not in gone]
        ages = tuple(len(self._versions) - 1 - self._versions.index(each.version) for each in chosen)
        return Replayed(rollouts=tuple(chosen), ages=ages)

    def add(self, version: str, rows: Sequence[R], *, uses: Mapping[str, tuple[CallUse, ...]]) -> None:
        """Add the rollouts of a step that have a gradient.

        `version` is the version of the policy that sampled them; `uses` has the uses of their calls, by rollout id.
        """
        if not self.share:
            return
        by_rollout: dict[str, list[R]] = {}
        for row in rows:
            by_rollout.setdefault(row.rollout, []).append(row)
        self._kept += [
            OldRollout(version=version, rows=tuple(own), uses=uses[name])
            for name, own in by_rollout.items()
            if not all(row.is_silent for row in own)
        ]

    def clear(self) -> None:
        """Remove all rollouts; call this when training continues from other weights than those that sampled them."""
        self._versions, self._kept = [], []

    def drop(self, rollouts: Collection[str]) -> None:
        """Remove rollouts that can no longer be trained on."""
        self._kept = [each for each in self._kept if each.rows[0].rollout not in rollouts]

    @property
    def rows(self) -> list[R]:
        """The rows of all rollouts of the pool, in the order of `state`."""
        return [row for each in self._kept for row in each.rows]

    def state(self) -> dict[str, Json]:
        """Return the content of the pool without the rows, as JSON."""
        return {
            "versions": list(self._versions),
            "rollouts": [
                {"version": each.version, "rows": len(each.rows), "uses": msgspec.to_builtins(each.uses)}
                for each in self._kept
            ],
        }

    def restore(self, state: Mapping[str, Json], rows: Sequence[R]) -> None:
        """Restore the pool from the results of `state` and `rows`."""
        self._versions, self._kept = list(state["versions"]), []
        place = 0
        for entry in state["rollouts"]:
            own = tuple(rows[place : place + int(entry["rows"])])
            place += len(own)
            uses = msgspec.convert(entry["uses"], tuple[CallUse, ...])
            self._kept.append(OldRollout(version=entry["version"], rows=own, uses=uses))


def _again(call: CallUse, *, age: int, bound: float) -> CallUse:
    """Return the use of a call in the step that replays it; a call that did not train keeps its use."""
    if call.row < 0:
        return call
    versions = "1 version" if age == 1 else f"{age} versions"
    note = f"replayed {versions} later, with importance weights of at most {bound:g}"
    return msgspec.structs.replace(call, note=note)
