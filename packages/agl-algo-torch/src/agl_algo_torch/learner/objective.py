"""The policy's objective over the rows of an update, which `grpo` and `ppo` share:

    sum_t w_t c_t loss_t / total  +  kl_coef * KL  -  entropy_coef * H

`loss_t` comes from a loss of `agl_objectives` or of another plugin. c_t is an importance weight; w_t and the total come
from the aggregation. A loss or a weight that depends on several rows is prepared here before the first micro-batch.
M is the number of trained tokens of a micro-batch, T the length of a row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import torch

from agl.errors import ConfigError
from agl_objectives.aggregation import loss_weights
from agl_objectives.contract import SurveyedLoss, TokenBatch
from agl_objectives.importance import Importance
from agl_objectives.kl import kl_estimate
from agl_objectives.registry import checked_terms, find_loss
from agl_objectives.settings import Correction, Objective

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from agl_algo_torch.learner.batch import MicroBatch, RowSample
    from agl_algo_torch.learner.policy_learner import PolicyLearner
    from agl_algo_torch.learner.scoring import Scores
    from agl_algo_torch.learner.token_numbers import TokenNumbers
    from agl_algo_torch.learner.tuned_policy import TunedPolicy
    from agl_objectives.aggregation import Aggregation

__all__ = ["PolicyObjective", "Tally"]

MASK_FLOOR = 0.5
"""In the mode `mask`, tokens with a lower importance weight are dropped (alpha of IcePop, arXiv 2510.18855)."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Collects the metrics of an update over its micro-batches.

    Attributes:
        sums: Sums over tokens, by metric.
        peaks: Largest values of any token, by metric.
        weights: Sum of the importance weights.
        squares: Sum of the squared importance weights.
        tokens: Takes the numbers of single tokens; None if they are not stored.
    """

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    peaks: dict[str, float] = field(default_factory=lambda: {"ratio_max": 0.0, "logprob_gap": 0.0})
    weights: float = 0.0
    squares: float = 0.0
    tokens: TokenNumbers | None = None

    def weigh(self, weight_M: Tensor) -> None:
        """Add the importance weights of tokens to the sums."""
        self.weights += float(weight_M.sum())
        self.squares += float((weight_M**2).sum())

    def report(self) -> dict[str, float]:
        """Return the metrics of the update: totals of loss and tokens, per-token means of other sums, peaks, and more.

        `effective_share` is the effective sample size of the importance weights k, (sum k)^2 / sum k^2, divided by the
        number of tokens. It is 1 if all weights are equal.
        """
        totals, tokens = {"loss", "tokens"}, self.sums["tokens"]
        found = {name: value if name in totals else value / tokens for name, value in self.sums.items()}
        if self.squares:
            found["effective_share"] = self.weights**2 / self.squares / tokens
        return found | self.peaks


class PolicyObjective:
    """The policy's objective.

    Args:
        algorithm: The algorithm's name, for messages.
        settings: The loss, the weights of tokens and the penalties.
        correction: The importance weights between the sampler and the old policy.
        updates: Number of updates of a step.

    Raises:
        ConfigError: The loss is unknown or cannot be called, or a setting has no effect.
    """

    def __init__(
        self, algorithm: str, settings: Objective, *, correction: Correction = Correction(), updates: int = 1
    ) -> None:
        found = find_loss(settings.loss, settings.loss_params)
        self._loss, self._entry = found.call, found.entry
        self._settings, self._updates = settings, updates
        self._aggregation: Aggregation = settings.aggregation or found.entry.aggregation
        floor = MASK_FLOOR if correction.mode == "mask" else 0.0
        self._importance = Importance(**msgspec.structs.asdict(correction), floor=floor)
        self._truncated_from = self._importance.cap or math.inf
        if settings.constant_tokens != Objective().constant_tokens and self._aggregation != "constant":
            raise ConfigError(
                f"{algorithm} got constant_tokens = {settings.constant_tokens}, by which only the aggregation "
                f'"constant" divides, and the aggregation is "{self._aggregation}". Remove it, or give aggregation = '
                '"constant".'
            )
        if self._entry.needs_updates and updates == 1:
            raise ConfigError(
                f'{algorithm} got loss = "{self._entry.name}", whose penalty has no gradient in the first update of a '
                "step, and a step has one update. Give updates_per_step or epochs above 1, or another loss."
            )

    def has_gradient(self, sample: RowSample) -> bool:
        """Return true if the row can have a gradient; other rows need no forward pass."""
        # A = 0 makes the policy gradient exactly 0, but a penalty or an entropy bonus still has a gradient.
        others = self._settings.kl_coef or self._settings.entropy_coef or self._entry.trains_silent
        return bool(sample.trained_tokens) and (bool(others) or not sample.is_silent)

    def weights(self, samples: Sequence[RowSample]) -> tuple[list[float], float]:
        """Return the weight of each sample's trained tokens, and the total that divides the update's weighted sums."""
        return loss_weights(samples, aggregation=self._aggregation, constant=self._settings.constant_tokens)

    def prepared(
        self, samples: Sequence[RowSample], *, learner: PolicyLearner, skips_silent: bool = True
    ) -> list[RowSample]:
        """Return a step's samples, with log pi_old added unless the update's own forward pass gives it."""
        # With one update pi_old is pi itself (r = 1), and the forward pass of the update gives it for free.
        # With several updates the weights move, so pi_old is computed before the first one.
        if self._updates == 1 and not self._importance.needs_rollouts:
            return list(samples)
        return self.with_old_logprobs(samples, learner=learner, skips_silent=skips_silent)

    def with_old_logprobs(
        self, samples: Sequence[RowSample], *, learner: PolicyLearner, skips_silent: bool = True
    ) -> list[RowSample]:
        """Return the samples with log pi_old added: the log-probabilities before the step's first update.

        With `skips_silent` rows without a gradient get no log pi_old and cost no forward pass, unless importance
        weights or the survey of the loss need whole rollouts.
        """
        is_whole = not skips_silent or self._importance.needs_rollouts or isinstance(self._loss, SurveyedLoss)
        wanted = [s for s in samples if (s.trained_tokens if is_whole else self.has_gradient(s))]
        found = learner.logprobs(wanted)
        by_row = {id(sample): old_T for sample, old_T in zip(wanted, found, strict=True)}
        rows = [replace(s, old=by_row[id(s)]) if id(s) in by_row else s for s in samples]
        return self._with_importance(rows) if self._importance.needs_rollouts else rows

    def surveyed(self, samples: Sequence[RowSample], *, learner: PolicyLearner) -> list[RowSample]:
        """Return an update's rows; if the loss surveys updates, the rows carry the survey's values in `extras`."""
        if not isinstance(self._loss, SurveyedLoss):
            return list(samples)
        rows = [sample for sample in samples if sample.trained_tokens]
        if self._entry.surveys_ratios and all(sample.old is None for sample in rows):
            logp = [sample.behaviour for sample in rows]  # pi is pi_old, and only their ratio is read: no pass
        else:
            logp = learner.logprobs(rows)
        found = self._loss.survey(self._tokens(rows, logp))
        parts = {name: _rows_of(values_M, rows) for name, values_M in found.items()}
        by_row = {id(s): {name: values[i] for name, values in parts.items()} for i, s in enumerate(rows)}
        return [replace(s, extras=by_row[id(s)]) if id(s) in by_row else s for s in samples]

    def loss(self, batch: MicroBatch, *, model: nn.Module, tuned: TunedPolicy, tally: Tally) -> Tensor:
        """Return a micro-batch's contribution to the update's objective, a scalar with gradient; adds metrics to
        `tally`.

        `tuned` provides the reference model of the KL penalty.
        """
        scores = batch.scores(model, has_entropy=True, has_bonus=bool(self._settings.entropy_coef))
        logp_M = scores.logp_M  # [M], log pi(y_t), with gradient
        # log pi_old(y_t), [M]. In a step of one update it has the values of logp, without gradient: r is 1, and its
        # gradient is that of logp.
        old_M = logp_M.detach() if batch.old_M is None else batch.old_M
        tokens = batch.tokens(logp_M, old_M=old_M, entropy_M=scores.entropy_M)
        terms = checked_terms(self._entry.name, self._loss(tokens), logp_M)
        loss = batch.mean(self._weighted(terms.loss_M, batch, old_M=old_M, tally=tally))
        if self._settings.kl_coef:
            # The penalty is a term of the loss, as in GRPO's paper, and not of the reward, as in PPO for RLHF. The
            # advantages then come from the task alone, and a critic need not predict the penalty.
            with torch.no_grad(), tuned.reference.active() as model_ref:
                reference_M = batch.logprobs(model_ref)  # [M]
            kl_M = kl_estimate(logp_M, reference_M, kind=self._settings.kl)
            loss = loss + self._settings.kl_coef * batch.mean(kl_M)
            tally.sums["kl"] += float(kl_M.detach().sum())
        if scores.bonus_M is not None:
            loss = loss - self._settings.entropy_coef * batch.mean(scores.bonus_M)
        self._note(tally, loss, scores, counts=terms.counts)
        if tally.tokens is not None and scores.entropy_M is not None:
            tally.tokens.note_entropies(batch, scores.entropy_M)
        _note_peaks(tally, logp_M.detach(), old_M=old_M, behaviour_M=batch.behaviour_M)
        return loss

    def _weighted(self, loss_M: Tensor, batch: MicroBatch, *, old_M: Tensor, tally: Tally) -> Tensor:
        """Return the loss of every token, multiplied by the token's importance weight."""
        weight_M = batch.importance_M  # computed in advance, over whole rollouts or for replayed rows
        if weight_M is None and not self._importance.cap:
            return loss_M
        if weight_M is None:
            weight_M = self._importance.weights(old_M, batch.behaviour_M, rollout_M=batch.rollout_M)
        name, chosen_M = "tis_truncated", weight_M >= self._truncated_from
        if self._importance.mode == "mask":
            name, chosen_M = "tis_masked", weight_M == 0
        tally.sums[name] += int(chosen_M.sum())
        tally.weigh(weight_M)
        return loss_M * weight_M

    def _note(self, tally: Tally, loss: Tensor, scores: Scores, *, counts: Mapping[str, float]) -> None:
        tally.sums["loss"] += float(loss.detach())  # already divided by the total
        if scores.entropy_M is not None:
            tally.sums["entropy"] += float(scores.entropy_M.sum())
        tally.sums["tokens"] += len(scores.logp_M)
        for name, value in counts.items():
            tally.sums[name] += value

    def _with_importance(self, samples: list[RowSample]) -> list[RowSample]:
        """Return the samples with importance weights added, which are computed over whole rollouts."""
        rows = [sample for sample in samples if sample.old is not None]
        tokens = self._tokens(rows, [sample.behaviour for sample in rows])
        found_M = self._importance.weights(tokens.old_M, tokens.behaviour_M, rollout_M=tokens.rollout_M)
        # All truncated weights are equal, also after the division by the mean, and no other weight is larger.
        truncated_M = self._importance.truncated(tokens.old_M, tokens.behaviour_M, rollout_M=tokens.rollout_M)
        self._truncated_from = float(found_M[truncated_M].min()) if bool(truncated_M.any()) else math.inf
        by_row = {id(sample): part for sample, part in zip(rows, _rows_of(found_M, rows), strict=True)}
        return [replace(s, importance=by_row[id(s)]) if id(s) in by_row else s for s in samples]

    def _tokens(self, rows: Sequence[RowSample], logp: Sequence[Tensor]) -> TokenBatch:
        """Return the trained tokens of `rows` as the record that losses take, on the CPU; `logp` has a [T] per row."""
        weight, _ = self.weights(rows)
        number = {rollout: n for n, rollout in enumerate(dict.fromkeys(row.rollout for row in rows))}

        def flat(parts: Sequence[Tensor]) -> Tensor:
            chosen = [part[row.trained] for part, row in zip(parts, rows, strict=True)]
            return torch.cat(chosen or [torch.zeros(0)])

        def spread(values: Sequence[float]) -> Tensor:
            return flat([torch.full((len(row.ids),), value) for row, value in zip(rows, values, strict=True)])

        return TokenBatch(
            logp_M=flat(logp),
            old_M=flat([own if row.old is None else row.old for row, own in zip(rows, logp, strict=True)]),
            behaviour_M=flat([row.behaviour for row in rows]),
            advantages_M=flat([row.advantages for row in rows]),
            weight_M=spread(weight),
            row_M=spread(range(len(rows))),
            rollout_M=spread([number[row.rollout] for row in rows]),
        )


def _rows_of(values_M: Tensor, rows: Sequence[RowSample]) -> list[Tensor]:
    """Split values of trained tokens, [M], into one tensor [T] per row, which is 0 at other tokens."""
    found: list[Tensor] = []
    start = 0
    for row in rows:
        full_T = torch.zeros(len(row.ids), dtype=values_M.dtype)
        full_T[row.trained] = values_M[start : start + row.trained_tokens]
        found.append(full_T)
        start += row.trained_tokens
    return found


def _note_peaks(tally: Tally, logp_M: Tensor, *, old_M: Tensor, behaviour_M: Tensor) -> None:
    if not len(logp_M):
        return
    tally.peaks["ratio_max"] = max(tally.peaks["ratio_max"], float((logp_M - old_M).max().exp()))
    # The gap is in nats. Large values mean that sampler and trainer disagree about the same tokens.
    tally.peaks["logprob_gap"] = max(tally.peaks["logprob_gap"], float((old_M - behaviour_M).abs().max()))
