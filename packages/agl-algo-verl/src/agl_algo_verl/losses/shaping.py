"""Changes to advantages that need the models: a KL penalty in the reward, and a critic's values.

The penalty (Ziegler et al. 2019, arXiv 1909.08593) subtracts `beta * KL_t` from the reward of every token:

    r_t' = r_t - beta * KL_t        KL_t estimates log pi_old(y_t) - log pi_ref(y_t) at the sampled token y_t

pi_old is the policy before the step's first update, pi_ref the reference. The estimates k1, k2, k3 of VERL's
`kl_penalty` are those of Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html, 2020). Estimators
that score whole rollouts use the sum: the value of each call of a rollout is reduced by it.

With a critic V, advantages are generalised advantage estimates (GAE, Schulman et al. 2015, arXiv 1506.02438, section
3), computed by VERL over the trained tokens of each row; t + 1 is the row's next trained token:

    delta_t = r_t + gamma * V_{t+1} - V_t
    A_t     = delta_t + gamma * lambda * A_{t+1}
    R_t     = A_t + V_t                             the critic's target

VERL then whitens A_t over the trained tokens of the step; R_t is not changed.

Credit gives returns per call, G_k. They become rewards: G_k - G_{k+1} at the last token of call k, and G_n at the last
token of the row's last call. With gamma = 1 the rewards from any token of call k on then sum to G_k, whatever the
credit, so lambda = 1 gives A_t = G_k - V_t before whitening.

Deviations from VERL, and why:
- The KL that adapts beta is the mean over all trained tokens of the step, where VERL takes the mean over rows of each
  row's mean: the division of a rollout into rows must not affect it.
- If a step has a single trained token, whitening would divide by zero, so its advantage is 0.

Axes: B rows, R tokens of a response (in a batch, of the longest), M trained tokens of a step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace as changed
from torch.nn.utils.rnn import pad_sequence

from agl.errors import ConfigError
from agl_algo_verl.losses.choice import chosen_estimator
from agl_algo_verl.rows.rows import spread
from agl_algo_verl.typed import floats, verl_part
from agl_objectives.advantages import call_advantages
from agl_objectives.kl import kl_estimate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.schemas import CallCredit
    from agl_algo_verl.rows.rows import PreparedStep, RowSample
    from agl_algo_verl.settings.settings import AlgorithmKeys, VerlSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """The KL penalty of a step.

    Attributes:
        rewards: `-beta * KL_t` at every trained token and 0 elsewhere; [R] per sample, float32.
        kl: Mean of KL_t over the step's trained tokens, in nats, without the factor beta.
    """

    rewards: list[Tensor]
    kl: float


def penalise(samples: Sequence[RowSample], *, settings: AlgorithmKeys, beta: float) -> KlPenalty:
    """Return `-beta * KL` of every trained token, by VERL's estimate of the KL; rows need `old` and `reference`."""
    function = verl_part("verl.trainer.ppo.core_algos:kl_penalty")
    # The mask is applied after the estimate: tokens that the policy did not write (tool results) cost nothing.
    found = [function(sample.old, sample.reference, kl_penalty=settings.kl_penalty) * sample.mask for sample in samples]
    tokens = sum(sample.trained_tokens for sample in samples)
    total = sum(float(kl_R.sum()) for kl_R in found)
    # Per token and not per rollout: the target of an adaptive beta must not depend on the length of answers.
    return KlPenalty(rewards=[-beta * kl_R for kl_R in found], kl=total / max(1, tokens))  # a step without rows: 0


def with_penalty(
    prepared: PreparedStep, samples: Sequence[RowSample], *, penalty: KlPenalty, settings: VerlSettings
) -> list[RowSample]:
    """Return the samples with new advantages: the credit of each call is reduced by its rollout's whole penalty.

    Raises ConfigError if credit gives finished advantages, from which a penalty cannot be subtracted.
    """
    lost: defaultdict[str, float] = defaultdict(float)  # by rollout: -beta * sum of KL_t over all its rows
    for sample, rewards_R in zip(samples, penalty.rewards, strict=True):
        lost[sample.rollout] += sum(floats(rewards_R))  # Python floats: sums in float64
    # Every call bears the whole penalty of its rollout, as if it were part of the rollout's return. A rollout without
    # rows loses nothing and still counts in its group's mean and deviation.
    credits = [
        [_with_penalty(call, lost[rollout]) for call in calls]
        for (rollout, _), calls in zip(prepared.rollouts, prepared.credits, strict=True)
    ]
    groups = [group for _, group in prepared.rollouts]
    estimator = chosen_estimator(settings).call
    found = call_advantages(credits, groups=groups, tokens=prepared.tokens, estimator=estimator)
    by_rollout = {rollout: values for (rollout, _), values in zip(prepared.rollouts, found, strict=True)}
    return [
        replace(sample, advantages=spread(by_rollout[sample.rollout], calls=sample.calls, length=len(sample.mask)))
        for sample in samples
    ]


def _with_penalty(call: CallCredit, penalty: float) -> CallCredit:
    """Return the call with `penalty`, usually a negative number, added to its credit."""
    if call.is_advantage:
        raise ConfigError(
            "algorithm.use_kl_in_reward takes a penalty off returns, and the configured credit gives finished "
            "advantages. Use actor_rollout_ref.actor.use_kl_loss = true, or a credit of returns such as "
            '[credit] use = "turn".'
        )
    return changed(call, value=call.value + penalty)


def with_values(
    prepared: PreparedStep, samples: Sequence[RowSample], *, penalty: KlPenalty | None, settings: AlgorithmKeys
) -> list[RowSample]:
    """Return the samples with advantages and returns, which VERL's GAE computes from the critic's `values`.

    Raises ConfigError if credit gives finished advantages, because the critic would be ignored.
    """
    if not samples:
        return []
    returns = call_returns(prepared)
    taken = penalty.rewards if penalty else [torch.zeros(len(sample.mask)) for sample in samples]
    # r_t' = r_t - beta * KL_t, [R] per row: the penalty stays at its own token, from which GAE discounts it.
    rewards = [call_rewards(s, returns[s.rollout]) + lost_R for s, lost_R in zip(samples, taken, strict=True)]
    advantages_B_R, returns_B_R = gae(samples, rewards, gamma=settings.gamma, lam=settings.lam)
    return [
        # [: len(mask)] removes the padding; VERL's losses read float32
        replace(sample, advantages=found_R[: len(sample.mask)].float(), returns=target_R[: len(sample.mask)].float())
        for sample, found_R, target_R in zip(samples, advantages_B_R, returns_B_R, strict=True)
    ]


def gae(samples: Sequence[RowSample], rewards: Sequence[Tensor], *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return VERL's whitened advantages and the returns of rows with `values`; both [B, R], float64, 0 where untrained.

    Whitening needs two trained tokens; a single one gets the advantage 0.
    """
    # Padding is masked and so outside every sum; float64, because A_t accumulates over a whole response.
    values_B_R = pad_sequence([_present(sample.values) for sample in samples], batch_first=True).double()  # [B, R]
    mask_B_R = pad_sequence([sample.mask for sample in samples], batch_first=True).double()  # [B, R]
    rewards_B_R = pad_sequence(list(rewards), batch_first=True).double()  # [B, R]
    if float(mask_B_R.sum()) < 2:
        return torch.zeros_like(values_B_R), rewards_B_R * mask_B_R  # R_t = r_t: nothing follows the only token
    # Where the mask is 0 VERL carries V and A over unchanged, so a tool's result between two calls neither discounts
    # nor has a value.
    advantages_B_R, returns_B_R = verl_part("verl.trainer.ppo.core_algos:compute_gae_advantage_return")(
        token_level_rewards=rewards_B_R, values=values_B_R, response_mask=mask_B_R, gamma=gamma, lam=lam
    )
    # Whitening also moves untrained positions away from 0; they must not look like advantages.
    return advantages_B_R * mask_B_R, returns_B_R * mask_B_R


def call_returns(prepared: PreparedStep) -> dict[str, dict[str, float]]:
    """Return the return that credit gave each call, by rollout id and span id.

    Raises ConfigError if credit gives finished advantages, because the critic would be ignored.
    """
    return {
        rollout: {call.span_id: _return_of(call) for call in calls}
        for (rollout, _), calls in zip(prepared.rollouts, prepared.credits, strict=True)
    }


def call_rewards(sample: RowSample, returns: Mapping[str, float]) -> Tensor:
    """Return the reward at each token of a response, [R], float64; `returns` has each call's return, by span id."""
    rewards_R = torch.zeros(len(sample.mask), dtype=torch.float64)
    # Calls before the response have no token to carry a reward.
    parts = sorted((call for call in sample.calls if call[2] > 0), key=lambda call: call[1])  # by their first token
    for index, (span_id, _, stop) in enumerate(parts):
        # G_k - G_{k+1}: the sum over later calls telescopes to G_k. The last call of a row keeps its full return.
        later = returns[parts[index + 1][0]] if index + 1 < len(parts) else 0.0
        rewards_R[stop - 1] += returns[span_id] - later
    return rewards_R


def value_fit(samples: Sequence[RowSample]) -> dict[str, float]:
    """Return the mean value over trained tokens, and the share of the returns' variance that the critic explains.

    The share is 1 for a perfect critic, 0 for a constant one, and negative for a worse one.
    """
    if not samples:
        return {}
    values_M = torch.cat([_present(s.values)[s.mask] for s in samples]).double()  # [M]
    returns_M = torch.cat([_present(s.returns)[s.mask] for s in samples]).double()  # [M]
    spread_of = float(returns_M.var(correction=0))
    # 1 - Var(R - V) / Var(R); if all returns are equal there is nothing to explain, and 0 is logged
    share = 1.0 - float((returns_M - values_M).var(correction=0)) / spread_of if spread_of > 0 else 0.0
    return {"value": float(values_M.mean()), "explained_variance": share}


def logprob_gaps(samples: Sequence[RowSample]) -> dict[str, float]:
    """Return the largest and the mean absolute difference between the engine's and the recorded log-probabilities.

    Both are in nats over trained tokens, and 0 if there is no such token.
    """
    found = [abs(x) for s in samples if s.old is not None for x in floats((s.old - s.behaviour)[s.mask])]
    return {"logprob_gap": max(found, default=0.0), "logprob_gap_mean": sum(found) / max(1, len(found))}


def distance(samples: Sequence[RowSample]) -> dict[str, float]:
    """Return the mean k3 estimate of the KL to the reference, in nats per trained token, as the metric `kl`.

    The metric is the same as in agl-algo-torch; without a trained token nothing is returned.
    """
    found = [
        kl_estimate(_present(s.old), _present(s.reference), kind="k3")[s.mask] for s in samples if s.trained_tokens
    ]
    return {"kl": float(torch.cat(found).mean())} if found else {}


def _return_of(call: CallCredit) -> float:
    if call.is_advantage:
        raise ConfigError(
            'algorithm.adv_estimator = "gae" takes the critic\'s values off returns, and the configured credit gives '
            'finished advantages. Use a credit of returns, such as [credit] use = "turn", or the estimator "grpo".'
        )
    return call.value


def _present(values: Tensor | None) -> Tensor:
    if values is None:
        raise AssertionError("the models have seen every row")
    return values
