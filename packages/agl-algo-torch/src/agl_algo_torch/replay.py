"""Keeps rollouts of earlier steps that may be trained once more, with weights for the policy that they came from.

A step replaces none of its own rollouts. It adds some of earlier steps, so that they are the share `replay` of those
that it trains on: the newest version of the policy first, and among its rollouts the largest mean |advantage|. With mu
the policy that drew a token, as it was recorded, the loss of a replayed token is weighted by

    c_t = min(pi_old(y_t) / mu(y_t), replay_bound)

which is the correction that `objective.py` makes for the sampler's numerics, here for a sampler that is some versions
old (truncated importance sampling, as in IMPALA, Espeholt et al. 2018, arXiv 1802.01561, section 4.1).

Bounds, each counted: a rollout is replayed once at most, by a policy at most `replay_max_staleness` versions after the
one that drew it, and never when it had no gradient. Its advantages stay those of its own step, because its group is
complete only there.

The ledger of trained rollouts says which step trained on a rollout as its own, once; a replay is not entered there and
stands in the training record of its step (`agl why`) and in `rollouts_replayed`. The rows are saved beside the
checkpoint, so a resumed run replays what an uninterrupted one does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import torch

from agl.contracts import CallUse
from agl.errors import ConfigError
from agl_algo_torch.batch import RowSample
from agl_algo_torch.checkpoint import prune, step_directory, write_directory
from agl_algo_torch.tuned_policy import shares
from agl_algo_torch.typed_torch import read_tensors, write_tensors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from agl_algo_torch.objective import Objective

BOUND, MAX_STALENESS = 2.0, 4
"""Largest importance weight and most versions, unless others are asked for."""

TENSORS = ("ids", "mask", "advantages", "behaviour", "temperature")
"""The tensors of a row that are kept; what a later step computes anew is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRollout:
    """A rollout of an earlier step: its rows, what that step did with its calls, and the version that drew it."""

    version: str
    rows: tuple[RowSample, ...]
    uses: tuple[CallUse, ...]

    @property
    def size(self) -> float:
        """Mean |advantage| over its trained tokens."""
        return float(torch.cat([row.advantages[row.trained].abs() for row in self.rows]).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The rollouts that a step replays, and how many versions each is behind."""

    rollouts: tuple[OldRollout, ...]
    ages: tuple[int, ...]

    @property
    def rows(self) -> list[RowSample]:
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


NOTHING = Replayed(rollouts=(), ages=())
"""No rollout of an earlier step."""


class ReplayBuffer:
    """The rollouts that may be replayed.

    Args:
        algorithm: Its registered name, for messages.
        share: Share of a step's trained rollouts that come from earlier steps, below 1; 0 turns replay off.
        bound: Largest importance weight of a replayed token.
        max_staleness: Versions of the policy that a replayed rollout may be behind.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, algorithm: str, *, share: float, bound: float, max_staleness: int) -> None:
        shares(algorithm, replay=share)
        if share == 1:
            raise ConfigError(f"{algorithm} got replay = 1, which leaves no room for a step's own rollouts; give less.")
        if not bound > 0 or max_staleness < 1:
            raise ConfigError(
                f"{algorithm} got replay_bound = {bound} and replay_max_staleness = {max_staleness}; give a largest "
                "weight above 0, such as 2.0, and at least 1 version."
            )
        ignored = {"replay_bound": bound != BOUND, "replay_max_staleness": max_staleness != MAX_STALENESS}
        if not share and any(ignored.values()):
            names = " and ".join(name for name, is_given in ignored.items() if is_given)
            raise ConfigError(
                f"{algorithm} got {names} without replay, which alone reads it. Give replay, or remove it."
            )
        self.share, self.bound = share, bound
        self._max_staleness = max_staleness
        self._versions: list[str] = []  # that drew rollouts, oldest first
        self._kept: list[OldRollout] = []

    def take(self, version: str, *, own: int) -> Replayed:
        """Return what is replayed beside `own` rollouts while `version` is live; drops what has become too old."""
        if not self.share:
            return NOTHING
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

    def add(self, version: str, samples: Sequence[RowSample], *, uses: Mapping[str, tuple[CallUse, ...]]) -> None:
        """Keep the rollouts of a step that have a gradient, drawn by `version`."""
        if not self.share:
            return
        by_rollout: dict[str, list[RowSample]] = {}
        for sample in samples:
            by_rollout.setdefault(sample.rollout, []).append(sample)
        self._kept += [
            OldRollout(version=version, rows=tuple(rows), uses=uses[name])
            for name, rows in by_rollout.items()
            if not all(row.is_silent for row in rows)
        ]

    def weighed(
        self, rows: Sequence[RowSample], *, objective: Objective, model: nn.Module, device: torch.device
    ) -> list[RowSample]:
        """Return rows with log pi_old and with importance weights for the policy that drew them."""
        found = objective.with_old_logprobs(rows, model=model, device=device, skips_silent=False)
        return [replace(row, importance=self._weights(row)) for row in found]

    def truncated(self, rows: Sequence[RowSample]) -> dict[str, float]:
        """Return the mean weight of the trained tokens of weighed rows, and the share of them at the bound."""
        weights = [row.importance[row.trained] for row in rows if row.importance is not None]
        if not weights:
            return {}
        weight_M = torch.cat(weights)
        return {
            "replay_weight": float(weight_M.mean()),
            "replay_truncated": float((weight_M >= self.bound).float().mean()),
        }

    def clear(self) -> None:
        """Forget everything: training goes on from other weights, which these rollouts do not lead to."""
        self._versions, self._kept = [], []

    def save(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
        """Write the rows beside the checkpoint of a step, and remove old ones as `PolicyLearner.save` does."""
        if not self.share:
            return

        def fill(directory: Path) -> None:
            rows = [row for each in self._kept for row in each.rows]
            tensors = {f"{i}/{name}": getattr(row, name) for i, row in enumerate(rows) for name in TENSORS}
            write_tensors(tensors, directory / "rows.safetensors")
            state = {
                "versions": self._versions,
                "rollouts": [
                    {
                        "id": each.rows[0].rollout,
                        "version": each.version,
                        "rows": len(each.rows),
                        "uses": msgspec.to_builtins(each.uses),
                    }
                    for each in self._kept
                ],
            }
            (directory / "replay.json").write_text(json.dumps(state), encoding="utf-8")

        write_directory(step_directory(workdir / "replay", step), fill)
        prune(workdir / "replay", step=step, keep=max(2, keep), kept=kept)

    def load(self, workdir: Path, *, step: int) -> None:
        """Continue with the rows that were saved at a step; with none where replay was off then."""
        source = step_directory(workdir / "replay", step)
        if not self.share or not source.is_dir():
            return
        state = json.loads((source / "replay.json").read_text(encoding="utf-8"))
        tensors = read_tensors(source / "rows.safetensors")
        self._versions, self._kept = list(state["versions"]), []
        place = 0
        for entry in state["rollouts"]:
            numbers = range(place, place := place + int(entry["rows"]))
            self._kept.append(
                OldRollout(
                    version=entry["version"],
                    rows=tuple(_row(entry["id"], tensors, number) for number in numbers),
                    uses=msgspec.convert(entry["uses"], tuple[CallUse, ...]),
                )
            )

    def _weights(self, row: RowSample) -> Tensor:
        """Return c_t of every token, [T]; it is read at trained tokens only."""
        if row.old is None:
            raise AssertionError("log pi_old of a replayed row is computed first")
        return (row.old - row.behaviour).exp().clamp(max=self.bound)


def _row(rollout: str, tensors: Mapping[str, Tensor], number: int) -> RowSample:
    found = {name: tensors[f"{number}/{name}"] for name in TENSORS}
    return RowSample(
        rollout=rollout,
        ids=found["ids"],
        mask=found["mask"],
        advantages=found["advantages"],
        behaviour=found["behaviour"],
        temperature=found["temperature"],
    )


def _again(call: CallUse, *, age: int, bound: float) -> CallUse:
    """Return the use of a call in a step that replays it; one that did not train does not train now."""
    if call.row < 0:
        return call
    versions = "1 version" if age == 1 else f"{age} versions"
    note = f"replayed {versions} later, with importance weights of at most {bound:g}"
    return msgspec.structs.replace(call, note=note)
