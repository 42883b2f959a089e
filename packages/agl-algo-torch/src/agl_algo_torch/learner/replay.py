"""Rollouts of earlier steps that `grpo` and `ppo` train once more: their importance weights and their files.

`agl_objectives.replay` chooses the rollouts. An older version mu of the policy sampled them, so their tokens get the
weights c_t = min(pi_old / mu, bound). `objective.py` makes the same correction for the sampler's numerics. The files
keep the rollouts over a restart; pictures stay in the store, and a rollout whose picture is gone by then is dropped.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from agl.schemas import MediaSpan, to_builtins
from agl_algo_torch.learner.batch import RowSample
from agl_algo_torch.learner.typed_torch import read_tensors, write_tensors
from agl_objectives.directories import damage, prune, step_directory, write_directory
from agl_objectives.replay import ReplayPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from agl.contracts import CallUse
    from agl_algo_torch.learner.objective import PolicyObjective
    from agl_algo_torch.learner.pictures import Pictures
    from agl_algo_torch.learner.policy_learner import PolicyLearner
    from agl_objectives.settings import Replay

    Shown = Callable[[Sequence[MediaSpan]], Awaitable[Pictures | None]]

TENSORS = ("ids", "mask", "advantages", "behaviour", "temperature")
"""Names of the tensors that are saved for a row; a later step computes the others again."""

REPLAY_FILE = "replay.json"
"""File of the saved rows with everything but tensors."""


class ReplayBuffer:
    """The rollouts of earlier steps that may be replayed, with their importance weights and files.

    Attributes:
        pool: The rollouts.
        share: Share of replayed rollouts among a step's trained rollouts; 0 turns replay off.
        bound: Upper bound on the importance weights of replayed rollouts.
    """

    def __init__(self, algorithm: str, settings: Replay) -> None:
        self.pool = ReplayPool[RowSample](algorithm, share=settings.share, max_staleness=settings.max_staleness)
        self.share, self.bound = settings.share, settings.bound

    def add(self, version: str, rows: Sequence[RowSample], *, uses: Mapping[str, tuple[CallUse, ...]]) -> None:
        """Add a step's rollouts to the pool."""
        self.pool.add(version, rows, uses=uses)

    def weighed(
        self, rows: Sequence[RowSample], *, objective: PolicyObjective, learner: PolicyLearner
    ) -> list[RowSample]:
        """Return the rows with log pi_old, and importance weights relative to the version that sampled each row."""
        found = objective.with_old_logprobs(rows, learner=learner, skips_silent=False)
        return [replace(row, importance=self._weights(row)) for row in found]

    def truncated(self, rows: Sequence[RowSample]) -> dict[str, float]:
        """Return two metrics of the rows' trained tokens: the mean importance weight, and the share at the bound."""
        weights = [row.importance[row.trained] for row in rows if row.importance is not None]
        if not weights:
            return {}
        weight_M = torch.cat(weights)
        return {
            "replay_weight": float(weight_M.mean()),
            "replay_truncated": float((weight_M >= self.bound).float().mean()),
        }

    def save(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
        """Write the pool's rows for a step, and remove older files by the rule of `PolicyLearner.save`."""
        if not self.share:
            return

        def fill(directory: Path) -> None:
            rows = self.pool.rows
            tensors = {f"{i}/{name}": getattr(row, name) for i, row in enumerate(rows) for name in TENSORS}
            write_tensors(tensors, directory / "rows.safetensors")
            seen = [row.pictures for row in rows]
            state: dict[str, Any] = {
                "pool": self.pool.state(),
                "names": [row.rollout for row in rows],
                "media": [[] if own is None else to_builtins(own.spans) for own in seen],
                "processor": next((own.modality.processor for own in seen if own is not None), ""),
            }
            (directory / REPLAY_FILE).write_text(json.dumps(state), encoding="utf-8")

        write_directory(step_directory(workdir / "replay", step), fill)
        prune(workdir / "replay", step=step, keep=max(2, keep), kept=kept)

    async def load(self, workdir: Path, *, step: int, shown: Shown, say: Callable[[str], None]) -> None:
        """Continue with the rows that were saved at a step; without whole saved rows the pool stays as it is.

        `shown` reads pictures, see `TunedPolicy.shown`. Rollouts are dropped if a picture is gone or went through
        another processor; `say` shows the user how many, and why.
        """
        source = step_directory(workdir / "replay", step)
        if not self.share or await asyncio.to_thread(damage, source, state=REPLAY_FILE):
            return
        state, rows = await asyncio.to_thread(_read, source)
        # A run from before pictures were trained saved no media.
        media = msgspec.convert(state.get("media", [()] * len(rows)), list[tuple[MediaSpan, ...]])
        spans = [span for own in media for span in own]
        pictures = await shown(spans) if spans else None
        known = pictures if pictures is not None and pictures.modality.processor == state["processor"] else None
        rows = [
            replace(row, pictures=known.of(own)) if known is not None else row
            for row, own in zip(rows, media, strict=True)
        ]
        self.pool.restore(state["pool"], rows)
        dropped = {row.rollout for row, own in zip(rows, media, strict=True) if own and row.pictures is None}
        if dropped:
            why = "the store no longer has their pictures" if known else "their pictures went through another processor"
            say(f"dropped {len(dropped)} of {len({row.rollout for row in rows})} rollouts to replay: {why}")
        self.pool.drop(dropped)

    def _weights(self, row: RowSample) -> Tensor:
        """Return c_t of every token, [T]; only the values at trained tokens are meaningful."""
        if row.old is None:
            raise AssertionError("log pi_old of a replayed row is computed first")
        return (row.old - row.behaviour).exp().clamp(max=self.bound)


def _read(source: Path) -> tuple[dict[str, Any], list[RowSample]]:
    state = json.loads((source / REPLAY_FILE).read_text(encoding="utf-8"))
    tensors = read_tensors(source / "rows.safetensors")
    return state, [_row(rollout, tensors, number) for number, rollout in enumerate(state["names"])]


def _row(rollout: str, tensors: Mapping[str, Tensor], number: int) -> RowSample:
    own: dict[str, Any] = {name: tensors[f"{number}/{name}"] for name in TENSORS}
    return RowSample(rollout=rollout, **own)
