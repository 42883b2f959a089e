"""Corrects the loss for tokens that another policy drew: importance weights and rejection, by VERL's keys.

The server computes with other kernels than the engine, and may have served older weights. With k_t = pi_old(y_t) /
pi_behaviour(y_t) for each trained token, `algorithm.rollout_correction` has these keys:

    rollout_is     weights the policy loss by agl_objectives.importance: `token` by k_t, `sequence` by their product.
                   rollout_is_threshold = b truncates, min(k, b); "a_b" keeps k where a <= k <= b, else 0 (IcePop)
    rollout_rs     rejects tokens by options such as "token_k1,seq_mean_k3"; a token must pass all of them.
                   token_k1: 1 / k_t, token_k2: (log k_t)^2 / 2, token_k3: k_t - 1 - log k_t. With seq_sum_,
                   seq_mean_ or seq_max_ in place of token_: the sum, mean or maximum over the tokens; for k1
                   the exponential of the sum or the mean of log(1 / k_t)
                   rollout_rs_threshold: an upper bound per option, or one for all; for k1 "a_b", or b for "1/b_b"
    bypass_mode    uses the recorded log-probabilities as pi_old, so that k_t = 1 and nothing has to be corrected

A rejected token contributes nothing to the loss, its entropy and KL terms included, but stays in the denominators, as
in VERL. Only the mean over the tokens of each rollout (`seq-mean-token-mean`) is a mean over the tokens that are kept;
a rollout without such tokens still counts as one.

Deviations from VERL: a sequence is a rollout with all its rows, and `rollout_is_batch_normalize` divides by the mean
over rollouts of the mean weight of their tokens. VERL counts rows, and takes the mean over tokens for `token`.

M is the number of trained tokens of a step, R the length of a response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_objectives.importance import Importance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from agl_algo_verl.rows.rows import RowSample
    from agl_algo_verl.settings.settings import RolloutCorrectionKeys

OPTIONS = (
    *(f"token_k{kind}" for kind in (1, 2, 3)),
    *(f"seq_{over}_k{kind}" for over in ("sum", "mean") for kind in (1, 2, 3)),
    *(f"seq_max_k{kind}" for kind in (2, 3)),
)
"""VERL's names for the statistics that decide which tokens are rejected."""

LIMIT = 20.0
"""Largest absolute value of a log-weight, as in VERL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The bounds of one statistic; for k1 they are logarithms."""

    option: str
    low: float
    high: float

    def holds(self, log_M: Tensor, rollout_M: Tensor) -> Tensor:
        """Return for each token whether the statistic is within the bounds, [M] bool."""
        # Schulman's estimates of KL(pi_behaviour || pi_old), each computed from log_M = log k_t of its token.
        kind = self.option[-2:]
        # k1 is log(1 / k_t): values and bounds are compared as logarithms, which gives the same decisions.
        values_M = {"k1": -log_M, "k2": 0.5 * log_M**2, "k3": torch.exp(log_M) - 1.0 - log_M}[kind]
        if not self.option.startswith("token"):
            # seq_OVER_k: one statistic for all tokens of a rollout, over its rows together.
            over = self.option.split("_")[1]
            size = int(rollout_M.max()) + 1 if len(rollout_M) else 0
            # [number of rollouts]; the reduced values are spread back to the tokens, [M].
            start = values_M.new_zeros(size)
            # The names of the reductions in torch.
            reduce = {"sum": "sum", "mean": "mean", "max": "amax"}[over]
            values_M = start.scatter_reduce(0, rollout_M, values_M, reduce=reduce, include_self=False)[rollout_M]
        # Bounds are inclusive, as in VERL.
        return (values_M >= self.low) & (values_M <= self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The importance weights and the rejection of a run; `importance` None and no `bounds` turn them off.

    Rollouts are numbered from 0.
    """

    importance: Importance | None = None
    bounds: tuple[Bound, ...] = ()

    @property
    def is_on(self) -> bool:
        """True if importance weights or rejection are configured."""
        return self.importance is not None or bool(self.bounds)

    def weights(self, old_M: Tensor, behaviour_M: Tensor, rollout_M: Tensor) -> Tensor:
        """Return the importance weight of every token, [M]; all 1 if importance weights are off."""
        if self.importance is None:
            # k_t = 1: every token counts as if pi_old had drawn it.
            return torch.ones_like(old_M)
        return self.importance.weights(old_M, behaviour_M, rollout_M=rollout_M)

    def keeps(self, old_M: Tensor, behaviour_M: Tensor, rollout_M: Tensor) -> Tensor:
        """Return for each token whether it is kept, [M] bool; false means rejected."""
        # log k_t; the clamp prevents an overflow of exp for tokens that are nearly impossible under pi_old.
        log_M = (old_M - behaviour_M).clamp(-LIMIT, LIMIT)
        kept_M = torch.ones_like(log_M, dtype=torch.bool)
        for bound in self.bounds:
            # A token must pass all options.
            kept_M &= bound.holds(log_M, rollout_M)
        return kept_M


def correction_of(keys: RolloutCorrectionKeys) -> Correction:
    """Return the correction that VERL's keys describe; raises ConfigError for invalid values."""
    importance = None
    if keys.rollout_is is not None:
        low, high = _threshold("rollout_is_threshold", keys.rollout_is_threshold)
        # b of `rollout_is_threshold`: the cap of min(k, b), or the upper end of IcePop's band a <= k <= b.
        importance = Importance(
            cap=high,
            level=keys.rollout_is,
            mode="truncate" if low is None else "mask",
            floor=low or 0.0,
            is_normalised=keys.rollout_is_batch_normalize,
        )
    return Correction(importance=importance, bounds=_bounds(keys))


def corrected(samples: Sequence[RowSample], correction: Correction) -> list[RowSample]:
    """Return a step's rows, which must have `old`, with importance weights added and rejected tokens marked."""
    rows = [row for row in samples if row.trained_tokens]
    if not (correction.is_on and rows):
        return list(samples)
    sizes = [row.trained_tokens for row in rows]
    old_M, behaviour_M, rollout_M = _tokens(rows)
    weights: Sequence[Tensor] = cast("Any", correction.weights(old_M, behaviour_M, rollout_M)).split(sizes)
    keeps: Sequence[Tensor] = cast("Any", correction.keeps(old_M, behaviour_M, rollout_M)).split(sizes)
    found: dict[int, RowSample] = {}
    for row, weight_N, keep_N in zip(rows, weights, keeps, strict=True):
        # From the M trained tokens back to each row's R positions; untrained tokens have weight 0.
        weight_R, rejected_R = torch.zeros_like(row.behaviour), torch.zeros_like(row.mask)
        weight_R[row.mask], rejected_R[row.mask] = weight_N.to(weight_R), ~keep_N
        # None if weights are off, so that the batch has no such field and VERL multiplies by nothing.
        weighed = replace(row, importance=weight_R) if correction.importance is not None else row
        found[id(row)] = replace(weighed, rejected=rejected_R) if correction.bounds else weighed
    # Rows without a trained token (held rows or padding) are returned unchanged.
    return [found.get(id(row), row) for row in samples]


def _tokens(rows: Sequence[RowSample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return log pi_old by the engine, log pi_behaviour by the server, and the rollout of each token, [M]."""
    # A sequence is a rollout with all its rows, so statistics cover their tokens together.
    numbers = {rollout: n for n, rollout in enumerate(dict.fromkeys(row.rollout for row in rows))}
    sizes = torch.tensor([row.trained_tokens for row in rows])
    old_M = torch.cat([(row.behaviour if row.old is None else row.old)[row.mask] for row in rows])
    behaviour_M = torch.cat([row.behaviour[row.mask] for row in rows])
    return old_M, behaviour_M, torch.tensor([numbers[row.rollout] for row in rows]).repeat_interleave(sizes)


def correction_metrics(samples: Sequence[RowSample], correction: Correction) -> dict[str, float]:
    """Return the shares of tokens with a weight at its bound and of rejected tokens, and the effective share.

    The effective share is (sum of weights)^2 / sum of squared weights, divided by the number of tokens. All are taken
    over the rows with an advantage, or over all rows if no row has one, because weights have no effect on the others.
    """
    rows = [row for row in samples if row.trained_tokens]
    # Where A = 0 the weight changes no gradient and would only blur the shares.
    rows = [row for row in rows if bool((row.advantages[row.mask] != 0).any())] or rows
    found: dict[str, float] = {}
    importance = correction.importance
    if importance is not None and rows:
        # w_t of the trained tokens, in float64 because squares are summed.
        weight_M = torch.cat([row.importance[row.mask] for row in rows if row.importance is not None]).double()
        # Tokens at the cap; their gradient is too small by the factor by which k_t exceeds b.
        old_M, behaviour_M, rollout_M = _tokens(rows)
        name, chosen_M = "tis_truncated", importance.truncated(old_M, behaviour_M, rollout_M=rollout_M)
        if importance.mode == "mask":
            name, chosen_M = "tis_masked", weight_M == 0
        found[name] = float(chosen_M.double().mean())
        # Kish's effective sample size as a share: 1 if all weights are equal.
        squares = float((weight_M**2).sum())
        if squares:
            found["effective_share"] = float(weight_M.sum()) ** 2 / squares / len(weight_M)
    if correction.bounds and rows:
        # Rejected tokens lose their gradient but stay in the denominators.
        rejected_M = torch.cat([row.rejected[row.mask] for row in rows if row.rejected is not None])
        found["rejected_share"] = float(rejected_M.double().mean())
    return found


def _bounds(keys: RolloutCorrectionKeys) -> tuple[Bound, ...]:
    name = "algorithm.rollout_correction.rollout_rs"
    if keys.rollout_rs is None:
        return ()
    # A repeated option counts once.
    options = list(dict.fromkeys(part.strip() for part in keys.rollout_rs.split(",") if part.strip()))
    for option in options:
        if option not in OPTIONS:
            hint = did_you_mean(option, OPTIONS, otherwise=f"use one of: {', '.join(OPTIONS)}.")
            raise ConfigError(f"{name} has {option!r}, which VERL does not know; {hint}")
    given = [part.strip() for part in str(keys.rollout_rs_threshold or "").split(",") if part.strip()]
    if not options or len(given) not in (1, len(options)):
        raise ConfigError(
            f"{name} = {keys.rollout_rs!r} with rollout_rs_threshold = {keys.rollout_rs_threshold!r}; give at least "
            "one option, and one threshold for all or one for each, separated by commas."
        )
    # A single threshold applies to all options.
    spread = given * len(options) if len(given) == 1 else given
    return tuple(_bound(option, text) for option, text in zip(options, spread, strict=True))


def _bound(option: str, text: str) -> Bound:
    low, high = _threshold("rollout_rs_threshold", text)
    if option.endswith("k1"):
        # A single `b` means the band 1/b to b, which is symmetric in the logarithm.
        low = 1.0 / high if low is None else low
        if low <= high:
            return Bound(option=option, low=math.log(low), high=math.log(high))
    elif low is None:
        return Bound(option=option, low=-math.inf, high=high)
    raise ConfigError(
        f"algorithm.rollout_correction.rollout_rs_threshold has {text!r} for {option}; give "
        + ('an upper bound above 1, or "LOW_HIGH".' if option.endswith("k1") else "one upper bound above 0.")
    )


def _threshold(name: str, value: str | float) -> tuple[float | None, float]:
    """Parse a threshold, a number or `"LOW_HIGH"`; returns the lower bound (None for a number) and the upper bound."""
    # "LOW_HIGH", or a number; VERL writes both as text.
    parts = str(value).split("_")
    try:
        low, high = (float(parts[0]) if len(parts) == 2 else None), float(parts[-1])
    except ValueError:
        low, high = None, 0.0
    if len(parts) > 2 or not 0 < high < math.inf or (low is not None and not 0 < low <= high):
        raise ConfigError(
            f"algorithm.rollout_correction.{name} has {value!r}; give a number above 0, or two of them as "
            '"LOW_HIGH", such as "0.5_5.0".'
        )
    return low, high
