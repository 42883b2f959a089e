"""Keeps rollouts of earlier steps that may be trained once more, and chooses those of a step.

A step replaces none of its own rollouts. It adds some of earlier steps, so that they are a given share of those that it
trains on: the newest version of the policy first, and among its rollouts the largest mean |advantage|. With mu the
policy that drew a token, as it was recorded, the loss of a replayed token is weighted by

    c_t = min(pi_old(y_t) / mu(y_t), bound)

which is truncated importance sampling, as in IMPALA (Espeholt et al. 2018, arXiv 1802.01561, section 4.1).

Bounds, each counted: a rollout is replayed once at most, by a policy at most `max_staleness` versions after the one
that drew it, and never when it had no gradient. Its advantages stay those of its own step, because its group is
complete only there.

The ledger of trained rollouts says which step trained on a rollout as its own, once; a replay is not entered there and
stands in the training record of its step (`agl why`) and in `rollouts_replayed`. An algorithm saves the rows with its
checkpoint, so a resumed run replays what an uninterrupted one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from agl.contracts import CallUse
from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.schemas import Json

__all__ = ["BOUND", "MAX_STALENESS", "OldRollout", "ReplayPool", "ReplayRow", "Replayed"]

BOUND = 2.0
"""Largest importance weight of a replayed token, unless another is asked for."""

MAX_STALENESS = 4
"""Versions of the policy that a replayed rollout may be behind, unless another number is asked for."""


class ReplayRow(Protocol):
    """A row as the pool reads it: the id of its rollout, and its advantages at the tokens that are trained."""

    @property
    def rollout(self) -> str:
        """Id of the row's rollout."""
        ...

    @property
    def advantages(self) -> Tensor:
        """One number per token."""
        ...

    @property
    def trained(self) -> Tensor:
        """True at trained tokens; bool, of the shape of `advantages`."""
        ...

    @property
    def is_silent(self) -> bool:
        """True if no trained token has an advantage."""
        ...


R = TypeVar("R", bound=ReplayRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRollout(Generic[R]):
    """A rollout of an earlier step: its rows, what that step did with its calls, and the version that drew it."""

    version: str
    rows: tuple[R, ...]
    uses: tuple[CallUse, ...]

    @property
    def size(self) -> float:
        """Mean |advantage| over its trained tokens."""
        own = [row.advantages[row.trained].abs() for row in self.rows]
        return sum(float(each.sum()) for each in own) / sum(map(len, own))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed(Generic[R]):
    """The rollouts that a step replays, and how many versions each is behind."""

    rollouts: tuple[OldRollout[R], ...] = ()
    ages: tuple[int, ...] = ()

    @property
    def rows(self) -> list[R]:
        """Their rows, those of one rollout side by side."""
        return [row for rollout in self.rollouts for row in rollout.rows]

    def uses(self, *, bound: float) -> dict[str, tuple[CallUse, ...]]:
        """Return what became of every call, by rollout id."""
        return {
            rollout.rows[0].rollout: tuple(_again(call, age=age, bound=bound) for call in rollout.uses)
            for rollout, age in zip(self.rollouts, self.ages, strict=True)
        }

    def metrics(self) -> dict[str, float]:
        """Return the number of rollouts and rows and the mean age in versions."""
        mean = sum(self.ages) / len(self.ages) if self.ages else 0.0
        return {
            "rollouts_replayed": float(len(self.rollouts)),
            "rows_replayed": float(len(self.rows)),
            "replay_staleness": mean,
        }


class ReplayPool(Generic[R]):
    """The rollouts that may be replayed.

    Args:
        algorithm: Its registered name, for messages.
        share: Share of a step's trained rollouts that come from earlier steps, below 1; 0 turns replay off.
        max_staleness: Versions of the policy that a replayed rollout may be behind.

    Raises:
        ConfigError: A value is out of range, or would be ignored.
    """

    def __init__(self, algorithm: str, *, share: float, max_staleness: int = MAX_STALENESS) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"{algorithm} got replay = {share}; it is a share, between 0 and 1.")
        if share == 1:
            raise ConfigError(f"{algorithm} got replay = 1, which leaves no room for a step's own rollouts; give less.")
        if max_staleness < 1:
            raise ConfigError(f"{algorithm} got replay_max_staleness = {max_staleness}; give at least 1 version.")
        if not share and max_staleness != MAX_STALENESS:
            raise ConfigError(
                f"{algorithm} got replay_max_staleness without replay, which alone reads it. Give replay, or remove it."
            )
        self.share = share
        self._max_staleness = max_staleness
        self._versions: list[str] = []  # that drew rollouts, oldest first
        self._kept: list[OldRollout[R]] = []

    def take(self, version: str, *, own: int) -> Replayed[R]:
        """Return what is replayed with `own` rollouts while `version` is live; drops what has become too old."""
        if not self.share:
            return Replayed()
        earlier = [each for each in self._versions if each != version]
        self._versions = [*earlier[-self._max_staleness :], version]
        self._kept = [each for each in self._kept if each.version in self._versions]
        # Those of the live version are on-policy where no step published since, and replaying them corrects nothing.
        old = [each for each in self._kept if each.version != version]
        old.sort(key=lambda each: (-self._versions.index(each.version), -each.size, each.rows[0].rollout))
        chosen = old[: int(own * self.share / (1 - self.share) + 0.5)]
        gone = {id(each) for each in chosen}
        self._kept = [each for each in self._kept if id(each) not in gone]
        ages = tuple(len(self._versions) - 1 - self._versions.index(each.version) for each in chosen)
        return Replayed(rollouts=tuple(chosen), ages=ages)

    def add(self, version: str, rows: Sequence[R], *, uses: Mapping[str, tuple[CallUse, ...]]) -> None:
        """Keep the rollouts of a step that have a gradient, drawn by `version`."""
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
        """Forget everything: training goes on from other weights, which these rollouts do not lead to."""
        self._versions, self._kept = [], []

    @property
    def rows(self) -> list[R]:
        """The rows of all rollouts that are kept, in the order of `state`."""
        return [row for each in self._kept for row in each.rows]

    def state(self) -> dict[str, Json]:
        """Return everything but the rows, as JSON."""
        return {
            "versions": list(self._versions),
            "rollouts": [
                {"version": each.version, "rows": len(each.rows), "uses": msgspec.to_builtins(each.uses)}
                for each in self._kept
            ],
        }

    def restore(self, state: Mapping[str, Json], rows: Sequence[R]) -> None:
        """Continue from a `state` and its `rows`."""
        self._versions, self._kept = list(state["versions"]), []
        place = 0
        for entry in state["rollouts"]:
            own = tuple(rows[place : place + int(entry["rows"])])
            place += len(own)
            uses = msgspec.convert(entry["uses"], tuple[CallUse, ...])
            self._kept.append(OldRollout(version=entry["version"], rows=own, uses=uses))


def _again(call: CallUse, *, age: int, bound: float) -> CallUse:
    """Return the use of a call in a step that replays it; one that did not train does not train now."""
    if call.row < 0:
        return call
    versions = "1 version" if age == 1 else f"{age} versions"
    note = f"replayed {versions} later, with importance weights of at most {bound:g}"
    return msgspec.structs.replace(call, note=note)
