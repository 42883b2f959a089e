"""Calls losses and estimators once, on a few numbers, so that a wrong function shows before the first rollout.

The numbers are those of six tokens of two rollouts. What a function does with all others is tested by
`agl_objectives.testing`.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from agl.errors import AglError, ConfigError
from agl_objectives.contract import Estimates, LossTerms, Scores, TokenBatch, surveyed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agl_objectives.contract import Estimator, Loss

__all__ = ["checked_terms", "try_estimator", "try_loss"]

T = TypeVar("T")

_LOSS = "return LossTerms(loss_M=...) with one number for each token, and let agl weigh them and add them up"
_ESTIMATOR = "return Estimates(found_S=..., unit_S=...) with one number each for every score"


def try_loss(name: str, loss: Loss) -> None:
    """Raise ConfigError for a loss that fails, gives no finite number for each token, or has no gradient."""
    logp_M = torch.tensor([-0.2, -1.0, -0.5, -2.0, -0.1, -0.7], requires_grad=True)
    old_M = logp_M.detach() + torch.tensor([0.0, 0.1, -0.1, 0.0, 0.2, -0.3])
    tokens = TokenBatch(
        logp_M=logp_M,
        old_M=old_M,
        behaviour_M=old_M,
        advantages_M=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        weight_M=torch.ones(6),
        row_M=torch.tensor([0, 0, 0, 1, 1, 1]),
        rollout_M=torch.tensor([0, 0, 0, 1, 1, 1]),
        entropy_M=torch.full((6,), 0.5),
    )
    terms = checked_terms(name, _called("loss", name, lambda: loss(surveyed(loss, tokens))), logp_M)
    if not bool(torch.isfinite(terms.loss_M).all()):
        raise ConfigError(f"The loss {name!r} returned {_shown(terms.loss_M)} for six tokens; {_LOSS}.")
    if not terms.loss_M.requires_grad:
        raise ConfigError(
            f"The loss {name!r} returned numbers without a gradient, from which nothing is learnt; compute them from "
            "tokens.logp_M by operations of torch, without detach() or item()."
        )


def try_estimator(name: str, estimator: Estimator) -> None:
    """Raise ConfigError for an estimator that fails, or gives no finite advantage and unit for each score."""
    scores = Scores(
        scores_S=torch.tensor([1.0, 0.0, 0.5, 0.25]),
        group_S=torch.tensor([0, 0, 0, 1]),
        tokens_S=torch.tensor([3, 4, 5, 6]),
        baseline_S=torch.tensor([0.5, 0.5, 0.5, 0.5]),
    )
    found: Any = _called("estimator", name, lambda: estimator(scores))
    if not isinstance(found, Estimates):
        raise ConfigError(f"The estimator {name!r} returned {type(found).__name__} for four scores; {_ESTIMATOR}.")
    for part, values in (("found_S", found.found_S), ("unit_S", found.unit_S)):
        if not (_has_shape(values, scores.scores_S) and bool(torch.isfinite(values).all())):
            raise ConfigError(
                f"The estimator {name!r} returned {part} = {_shown(values)} for four scores, of which the last is "
                f"alone in its group; {_ESTIMATOR}."
            )


def checked_terms(name: str, found: Any, logp_M: Tensor) -> LossTerms:
    """Return what a loss returned for tokens with `logp_M`; raises ConfigError for anything but a number for each."""
    if isinstance(found, LossTerms) and _has_shape(found.loss_M, logp_M):
        return found
    got = f"loss_M = {_shown(found.loss_M)}" if isinstance(found, LossTerms) else type(found).__name__
    raise ConfigError(f"The loss {name!r} returned {got} for {len(logp_M)} trained tokens; {_LOSS}.")


def _called(kind: str, name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except AglError:
        raise
    except Exception as error:  # the function is a user's or a plugin's
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        place = f" at {Path(frames[0].filename).name}:{frames[0].lineno}" if frames else ""
        raise ConfigError(
            f"The {kind} {name!r} raised {type(error).__name__}: {error}{place}, when it was called with a few numbers "
            "before the run; correct it, and test it with agl_objectives.testing."
        ) from error


def _has_shape(values: Any, like: Tensor) -> bool:
    return isinstance(values, torch.Tensor) and values.shape == like.shape


def _shown(values: Any) -> str:
    if not isinstance(values, torch.Tensor):
        return f"a {type(values).__name__}"
    return f"{values.tolist()}" if values.numel() <= 8 else f"a tensor of the shape {list(values.shape)}"  # pyright: ignore[reportUnknownMemberType]  # torch has no type for it
