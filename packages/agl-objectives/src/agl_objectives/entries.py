"""The decorators of losses and estimators, and the records that they leave; importing this does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agl.contracts import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

MARK = "__agl_entry__"
"""The attribute in which a decorated function or class carries its entry."""


class LossEntry(Entry, frozen=True, kw_only=True):
    """A loss that `loss` has named.

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


class EstimatorEntry(Entry, frozen=True, kw_only=True):
    """An estimator that `estimator` has named.

    Attributes:
        compares: `group` if the rollouts of one task are compared with each other, `batch` if all rollouts are.
        needs_baseline: Whether the estimator needs `Scores.baseline_S`, the reward of a greedy rollout.
    """

    compares: Literal["group", "batch"] = "group"
    needs_baseline: bool = False


def loss(
    name: str,
    /,
    *,
    aggregation: Literal["token", "sequence"] = "token",
    trains_silent: bool = False,
    surveys_ratios: bool = False,
    needs_updates: bool = False,
) -> Callable[[F], F]:
    """Name a loss: a function of a `TokenBatch`, or a class that makes an `agl_objectives.contract.Loss`.

    Its parameters are the keyword-only arguments of the function, or of the class. The decorated object is unchanged.
    The keywords are those of `LossEntry`.
    """

    def mark(made: F) -> F:
        entry = LossEntry(
            name=name,
            factory=made,
            aggregation=aggregation,
            trains_silent=trains_silent,
            surveys_ratios=surveys_ratios,
            needs_updates=needs_updates,
        )
        setattr(made, MARK, entry)
        return made

    return mark


def estimator(
    name: str, /, *, compares: Literal["group", "batch"] = "group", needs_baseline: bool = False
) -> Callable[[F], F]:
    """Name an estimator: an `agl_objectives.contract.Estimator`, or a class that makes one.

    The keywords are those of `EstimatorEntry`.
    """

    def mark(made: F) -> F:
        setattr(made, MARK, EstimatorEntry(name=name, factory=made, compares=compares, needs_baseline=needs_baseline))
        return made

    return mark
