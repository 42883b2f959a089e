"""The records by which a plugin registers losses and estimators; importing this does not import torch."""

from __future__ import annotations

from typing import Literal

from agl.contracts import Entry


class LossEntry(Entry, frozen=True, kw_only=True):
    """Registers a loss.

    The factory is a class that makes an `agl_objectives.contract.Loss` from its parameters, or a function of a
    `TokenBatch` that is the loss itself. The parameters of a function are its keyword-only arguments.

    Attributes:
        aggregation: The default aggregation of an algorithm with this loss.
        trains_silent: Whether tokens with an advantage of 0 may have a gradient and need a forward pass.
        surveys_ratios: Whether the survey uses log-probabilities only as differences to the old ones. It then needs no
            forward pass while the policy is still the old one.
        needs_updates: Whether the loss has a penalty without a gradient while the policy is still the old one. A step
            with only one update is then refused.
    """

    aggregation: Literal["token", "sequence"] = "token"
    trains_silent: bool = False
    surveys_ratios: bool = False
    needs_updates: bool = False

    def try_out(self) -> None:
        """Call the loss once, unless it needs parameters; raises ConfigError if it fails or trains nothing."""
        from agl_objectives.registry import try_entry  # imports torch

        try_entry(self)


class EstimatorEntry(Entry, frozen=True, kw_only=True):
    """Registers an estimator; the factory is an `agl_objectives.contract.Estimator`, or a class that makes one.

    Attributes:
        compares: `group` if the rollouts of one task are compared with each other, `batch` if all rollouts are.
        needs_baseline: Whether the estimator needs `Scores.baseline_S`, the reward of a greedy rollout.
    """

    compares: Literal["group", "batch"] = "group"
    needs_baseline: bool = False

    def try_out(self) -> None:
        """Call the estimator once, unless it needs parameters; raises ConfigError if it fails."""
        from agl_objectives.registry import try_entry  # imports torch

        try_entry(self)
