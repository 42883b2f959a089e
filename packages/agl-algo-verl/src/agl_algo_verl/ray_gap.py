"""The gap of the log-probabilities, as training in one process logs it, in the metrics of VERL's trainer.

VERL reports how far recorded probabilities are from its own, which says little about unlikely tokens. The function
that does so is looked up by name in its trainer's module, and no setting names another, so that name is replaced: one
more line of VERL 0.9 that is repaired, on every machine. It is refused where that line is not found.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import TYPE_CHECKING, Any

from agl_algo_verl.patched_lines import expect_line

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST, MEAN = "agl/logprob_gap", "agl/logprob_gap_mean"

REPORT = "metrics.update(calculate_debug_metrics(data))"


def report_gap() -> None:
    """Make VERL's trainer in this process report the gap; may be called again."""
    trainer: Any = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    if not hasattr(trainer.calculate_debug_metrics, "__wrapped__"):
        expect_line(trainer.PPOTrainer._compute_old_log_prob, REPORT)
        trainer.calculate_debug_metrics = with_gap(trainer.calculate_debug_metrics)


def with_gap(report: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Return VERL's report with the gap, in nats, over the tokens that are trained."""

    @wraps(report)
    def reported(data: Any) -> dict[str, Any]:
        tensors = data.batch
        away_M = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).abs()[tensors["response_mask"].bool()]
        gaps = {LARGEST: float(away_M.max()), MEAN: float(away_M.mean())} if len(away_M) else {}
        return report(data) | gaps

    return reported
