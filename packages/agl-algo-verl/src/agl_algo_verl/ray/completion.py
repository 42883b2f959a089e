"""Completes a step's rows in VERL's trainer on Ray, after it has recomputed log-probabilities and before advantages.

Four things are not known earlier; VERL would base the first on rows:

    correction    importance weights and rejection over whole rollouts (`losses/correction.py`), in place of VERL's own.
                  Rejected tokens change the weights of a mean over sequences, so these are computed again.
    anchor        the loss's input for rows that are held (`loss_worker.anchored`). VERL pads a batch with copies of a
                  row; if that row is held, its copies are not.
    silence       updates that have no gradient after the correction, which the workers then skip
    numbers       the distance to the reference, and the weights of replayed rollouts, logged as in one process

B is the number of rows, R the length of a row's response.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from agl_algo_verl.losses.correction import Correction, corrected, correction_metrics
from agl_algo_verl.losses.shaping import distance
from agl_algo_verl.rows.batches import per_rollout, per_row, weighting
from agl_algo_verl.rows.replay import replay_weights
from agl_algo_verl.rows.rows import RowSample
from agl_algo_verl.typed import floats, integers, ragged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from agl_algo_verl.losses.choice import LossChoice

HELD = "agl_held"
"""Batch field, [B, 1]: 1 / U for held rows, where U is the number of held tokens in the row's update; else 0."""

ROW_MEAN = "seq-mean-token-mean"
"""VERL's mean over each row's tokens; with scaled advantages it becomes a mean over each rollout's tokens."""

REPLAYED = "agl_replayed"
"""Batch field, [B, 1]: 1 for rows on which earlier steps have trained, else 0."""

UPDATE = "agl_update"
"""Batch field, [B, 1]: the index of the row's update in the step."""

SILENT = "agl_silent"
"""Worker option: the indices of the updates that have no gradient."""

METRIC = "agl/"
"""Prefix of the metrics that agl adds to VERL's."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The changes that complete a step's rows: fields, worker options and metrics.

    Attributes:
        fields: The fields to change or to add, by name.
        options: Settings for VERL's training workers, by name.
        metrics: The metrics to log, by their names in VERL.
    """

    fields: dict[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to log; their names get agl's prefix."""
        self.metrics.update({METRIC + name: value for name, value in metrics.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Corrects the rows of a step and marks the held rows, before VERL computes advantages.

    Attributes:
        correction: Importance weights and rejection.
        anchor_coef: The weight of the anchor, 0 for none.
        measures_kl: True to log the distance to the reference, which requires that the reference runs.
        choice: The run's loss of agl-objectives; None for one of VERL's.
        mode: `loss_agg_mode` of the run's loss.
        has_gradient: Returns whether an update of the given rows can have a gradient; None if only VERL knows.
        epochs: How often each update of the step is made.
    """

    correction: Correction = field(default_factory=Correction)
    anchor_coef: float = 0.0
    measures_kl: bool = False
    choice: LossChoice | None = None
    mode: str = "token-mean"
    has_gradient: Callable[[Sequence[RowSample]], bool] | None = None
    epochs: int = 1

    @property
    def is_needed(self) -> bool:
        """True if the run needs any of the computations on a step's rows."""
        return self.correction.is_on or self.anchor_coef > 0 or self.measures_kl

    @property
    def scales_later(self) -> bool:
        """True if advantages become means over rollouts only here, because rejection decides which tokens count."""
        return self.choice is None and self.mode == ROW_MEAN and bool(self.correction.bounds)

    @property
    def reads(self) -> list[str]:
        """The names of the fields that :meth:`completed` reads."""
        names = ["response_mask", "old_log_probs", "rollout_log_probs", "rm_scores", "agl_rollout", UPDATE, REPLAYED]
        names += ["ref_log_prob"] if self.anchor_coef or self.measures_kl else []
        return [*names, HELD] if self.anchor_coef else names

    def completed(self, data: TensorDict, *, padding: Sequence[bool]) -> Completed:
        """Return the changes to the fields of all B rows, in order, with worker options and metrics.

        Args:
            data: The fields of `reads`; ragged, one vector [R] per row, or [B, 1].
            padding: True for each row that only pads the batch.
        """
        found, given = Completed(), _samples(data)
        is_replayed = [bool(value) for value in floats(per_row(data, REPLAYED))]
        if self.measures_kl:
            own = [row for row, is_old in zip(given, is_replayed, strict=True) if not is_old]
            found.log(distance(own))
        if self.correction.is_on:
            rows = corrected(given, self.correction)
            found.fields.update(self._corrected(rows))
            found.log(correction_metrics(rows, self.correction))
            if self.correction.importance is not None:
                again = [row for row, is_old in zip(rows, is_replayed, strict=True) if is_old]
                found.log(replay_weights(again, bound=self.correction.importance.cap))
            if silent := self._silent(rows, updates=integers(per_row(data, UPDATE))):
                found.options[SILENT] = silent
                found.log({"updates_skipped": float(len(silent) * self.epochs)})
        if self.anchor_coef:
            found.fields.update(_anchored(data, padding=padding))
            found.options["agl_anchor_coef"] = self.anchor_coef
        return found

    def _silent(self, rows: Sequence[RowSample], *, updates: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the updates without a gradient; `updates` gives each row's update."""
        if self.has_gradient is None:
            return ()
        parts: defaultdict[int, list[RowSample]] = defaultdict(list)
        for row, update in zip(rows, updates, strict=True):
            parts[update].append(row)
        return tuple(update for update, part in sorted(parts.items()) if not self.has_gradient(part))

    def _corrected(self, rows: Sequence[RowSample]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.correction.importance is not None:
            weights = [torch.zeros_like(row.behaviour) if row.importance is None else row.importance for row in rows]
            found["rollout_is_weights"] = ragged(weights)
        if not self.correction.bounds:
            return found
        found["response_mask"] = ragged([row.kept.long() for row in rows])
        if self.scales_later:
            found["rm_scores"] = ragged([row.advantages for row in per_rollout(rows)])
        if self.choice is not None:
            # The number of rollouts only affects the divisor, which the rows already have.
            weight = weighting(rows, rollouts=1, choice=self.choice).weight
            found["agl_weight"] = torch.tensor([[weight[row.rollout]] for row in rows])
        return found


def _samples(data: TensorDict) -> list[RowSample]:
    """Return the batch's rows in the form that the correction reads; each is named by its rollout's number."""
    names = ("response_mask", "rm_scores", "rollout_log_probs", "old_log_probs")
    numbers = integers(per_row(data, "agl_rollout"))
    start = _start(data) if "ref_log_prob" in cast("Any", data) else [None] * len(numbers)
    return [
        RowSample(
            rollout=str(number),
            group=0,
            ids=torch.empty(0, dtype=torch.int64),  # the correction reads none
            mask=mask_R.bool(),
            advantages=scores_R,
            behaviour=behaviour_R,
            old=old_R,
            reference=start_R,
            temperature=1.0,
        )
        for number, start_R, mask_R, scores_R, behaviour_R, old_R in zip(
            numbers, start, *(_rows(data, name) for name in names), strict=True
        )
    ]


def _anchored(data: TensorDict, *, padding: Sequence[bool]) -> dict[str, Tensor]:
    """Return the fields for the anchor: 1 / U at the held tokens, and log pi_ref."""
    given = zip(floats(per_row(data, HELD)), padding, strict=True)
    shares = [0.0 if is_padding else share for share, is_padding in given]
    start = _start(data)
    return {
        "agl_anchor": ragged([torch.full_like(values_R, share) for share, values_R in zip(shares, start, strict=True)]),
        "agl_start": ragged(start),
    }


def _start(data: TensorDict) -> list[Tensor]:
    """Return log pi_ref of each row, [R]."""
    return [values_R.float() for values_R in _rows(data, "ref_log_prob")]


def _rows(data: TensorDict, name: str) -> Sequence[Tensor]:
    return cast("Any", data)[name].unbind()
