"""The records by which a plugin registers losses and estimators; importing this does not import torch."""

from __future__ import annotations

from typing import Literal

from agl.contracts import Entry


class LossEntry(Entry, frozen=True, kw_only=True):
    """Registers a loss; the factory builds an `agl_objectives.contract.Loss` from its parameters.

    The factory may also be the loss itself, a plain function of a `TokenBatch`; its parameters are then its keywords.

    Attributes:
        aggregation: How an algorithm weighs tokens with this loss unless a setting says otherwise.
        trains_silent: Whether tokens whose advantage is 0 may have a gradient, so that they are computed too.
        surveys_ratios: Whether a survey reads log-probabilities only as differences to the old ones, so that it needs
            no forward pass where the policy is the old one.
        needs_updates: Whether its penalty has no gradient while the policy is the old one, as it is in all of a step
            with one update.
    """

    aggregation: Literal["token", "sequence"] = "token"
    trains_silent: bool = False
    surveys_ratios: bool = False
    needs_updates: bool = False


class EstimatorEntry(Entry, frozen=True, kw_only=True):
    """Registers an estimator; the factory is, or builds, an `agl_objectives.contract.Estimator`.

    Attributes:
        compares: `group` where the rollouts of a task are compared with each other, `batch` where all are.
        needs_baseline: Whether `Scores.baseline_S` must be given.
    """

    compares: Literal["group", "batch"] = "group"
    needs_baseline: bool = False
