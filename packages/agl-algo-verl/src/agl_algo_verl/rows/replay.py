"""The rollouts of earlier steps on which `verl` trains again, for both engines.

`agl_objectives.replay` chooses the rollouts and sets their bounds. Their tokens are weighted by `rollout_correction`,
with `rollout_is_threshold` as the largest weight. This is VERL's own correction for tokens that other weights sampled,
so VERL's trainer on Ray applies it to them as to all others.

Replayed rollouts are distributed over the tasks of a step, so that every update has its share of them. With a critic
only the policy trains on them, in one process, because their targets are values of an older critic.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import torch as safetensors

from agl_algo_verl.rows.rows import RowSample
from agl_objectives.directories import damage, prune, step_directory, write_directory
from agl_objectives.replay import Replayed, ReplayPool

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from agl.contracts import CallUse
    from agl_algo_verl.rows.rows import PreparedStep
    from agl_algo_verl.settings.settings import VerlSettings

TENSORS = ("ids", "mask", "advantages", "behaviour")
"""Names of the tensors that are stored for a row; a later step computes the others anew."""


class VerlReplay:
    """Chooses rollouts of earlier steps to replay, and stores them in files.

    Args:
        settings: VERL's configuration, with `replay` and `saving`.
        workdir: The algorithm's directory, in which the files are written.
    """

    def __init__(self, settings: VerlSettings, *, workdir: Path) -> None:
        self._pool = ReplayPool[RowSample](
            "verl", share=settings.replay.share, max_staleness=settings.replay.max_staleness
        )
        importance = settings.correction.importance
        self._bound = importance.cap if importance else 0.0
        self._workdir, self._keep = workdir.absolute() / "replay", settings.saving.keep

    @property
    def is_on(self) -> bool:
        """True if rollouts of earlier steps are replayed."""
        return self._pool.share > 0

    def take(self, prepared: PreparedStep, *, version: str) -> Replayed[RowSample]:
        """Return the rollouts to replay together with a step's own, while `version` is live."""
        return self._pool.take(version, own=len({sample.rollout for sample in prepared.samples}))

    def add(self, samples: Sequence[RowSample], *, version: str, uses: Mapping[str, tuple[CallUse, ...]]) -> None:
        """Store a step's own rows, with the advantages with which they were trained."""
        later = dict.fromkeys(("old", "entropy", "reference", "values", "returns", "importance", "rejected"))
        rows = [replace(row, **cast("Any", later)) for row in samples]
        self._pool.add(version, rows, uses=uses)

    def uses(self, replayed: Replayed[RowSample]) -> dict[str, tuple[CallUse, ...]]:
        """Return the uses of the calls of replayed rollouts, by rollout id."""
        return replayed.uses(bound=self._bound)

    def metrics(self, replayed: Replayed[RowSample]) -> dict[str, float]:
        """Return metrics about the replayed rollouts; empty if replay is off."""
        return replayed.metrics() if self.is_on else {}

    def weights(self, rows: Sequence[RowSample]) -> dict[str, float]:
        """Return metrics about the importance weights of replayed rows."""
        return replay_weights(rows, bound=self._bound)

    def clear(self, *, step: int) -> None:
        """Drop all stored rollouts after a step, because training continues from weights that did not sample them."""
        self._pool.clear()
        self.save(step=step)

    def save(self, *, step: int, kept: Collection[int] = ()) -> None:
        """Write the stored rows with the checkpoint of a step, and remove old files as for checkpoints."""
        if not self.is_on:
            return

        def fill(directory: Path) -> None:
            rows = self._pool.rows
            tensors = {f"{i}/{name}": getattr(row, name).contiguous() for i, row in enumerate(rows) for name in TENSORS}
            cast("Any", safetensors).save_file(tensors, directory / "rows.safetensors")
            about = [{"rollout": row.rollout, "temperature": row.temperature, "calls": row.calls} for row in rows]
            state = {"pool": self._pool.state(), "rows": about}
            (directory / "replay.json").write_text(json.dumps(state), encoding="utf-8")

        write_directory(step_directory(self._workdir, step), fill)
        prune(self._workdir, step=step, keep=max(2, self._keep), kept=kept)

    def load(self, *, step: int) -> str:
        """Load the rows that were stored at a step, if replay was on then; returns the damage that prevents it."""
        source = step_directory(self._workdir, step)
        if not (self.is_on and source.is_dir()):
            return ""
        if problem := damage(source):
            return problem
        state = json.loads((source / "replay.json").read_text(encoding="utf-8"))
        tensors: dict[str, torch.Tensor] = cast("Any", safetensors).load_file(source / "rows.safetensors")
        rows = [
            RowSample(
                rollout=about["rollout"],
                group=0,
                temperature=about["temperature"],
                calls=tuple((span_id, start, stop) for span_id, start, stop in about["calls"]),
                ids=tensors[f"{i}/ids"],
                mask=tensors[f"{i}/mask"],
                advantages=tensors[f"{i}/advantages"],
                behaviour=tensors[f"{i}/behaviour"],
            )
            for i, about in enumerate(state["rows"])
        ]
        self._pool.restore(state["pool"], rows)
        return ""


def replay_weights(rows: Sequence[RowSample], *, bound: float) -> dict[str, float]:
    """Return the mean importance weight of replayed rows' trained tokens, and the share of weights at the bound."""
    found = [row.importance[row.trained] for row in rows if row.importance is not None]
    weight_M = torch.cat(found) if found else torch.empty(0)
    if not len(weight_M):
        return {}
    return {
        "replay_weight": float(weight_M.mean()),
        "replay_truncated": float((weight_M >= bound).float().mean()),
    }


def with_replayed(prepared: PreparedStep, replayed: Replayed[RowSample]) -> PreparedStep:
    """Return the step with the replayed rows added, distributed over the step's tasks."""
    tasks = 1 + max((place for _, place in prepared.rollouts), default=0)
    places = {each.rows[0].rollout: index % tasks for index, each in enumerate(replayed.rollouts)}
    rows = [replace(row, group=places[row.rollout]) for row in replayed.rows]
    return replace(prepared, samples=[*prepared.samples, *rows], rollouts=[*prepared.rollouts, *places.items()])
