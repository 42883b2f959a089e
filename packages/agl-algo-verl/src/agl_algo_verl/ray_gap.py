"""The gap between log-probabilities, as training in one process logs it, in the metrics of VERL's trainer.

The gap is |log pi_old - log pi_behaviour| of a trained token, in nats: how far the trainer is from what the server
recorded. VERL reports the difference of the probabilities themselves, which says little about unlikely tokens, where
a ratio of ten may be a difference of a thousandth.
No setting of VERL names another report. Its trainer looks the function up by name in its own module, so that name is
replaced here, on every machine, and the replacement is refused where VERL's line is not found.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import TYPE_CHECKING, Any

from agl_algo_verl.patched_lines import expect_line

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST, MEAN = "agl/logprob_gap", "agl/logprob_gap_mean"
"""Names of the largest and the mean gap among VERL's metrics."""

REPORT = "metrics.update(calculate_debug_metrics(data))"
"""The line of VERL's trainer whose function is replaced."""


def report_gap() -> None:
    """Make VERL's trainer in this process report the gap; calling it again changes nothing."""
    trainer: Any = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    if not hasattr(trainer.calculate_debug_metrics, "__wrapped__"):
        expect_line(trainer.PPOTrainer._compute_old_log_prob, REPORT)
        trainer.calculate_debug_metrics = with_gap(trainer.calculate_debug_metrics)


def with_gap(report: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Return VERL's report with the gap, in nats, over the tokens that are trained."""

    @wraps(report)
    def reported(data: Any) -> dict[str, Any]:
        tensors = data.batch
        # [M]: the trained tokens of all rows; both inputs are [B, R] and padded
        away_M = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).abs()[tensors["response_mask"].bool()]
        gaps = {LARGEST: float(away_M.max()), MEAN: float(away_M.mean())} if len(away_M) else {}
        return report(data) | gaps

    return reported
