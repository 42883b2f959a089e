"""What becomes of advantages once the models have spoken: a KL penalty in the reward, and a critic's values.

VERL takes `beta * KL` off the reward of every token, where KL compares the policy before the step with the reference.
Estimators that score whole rollouts see the sum: each call of a rollout is worth that much less.

With a critic, advantages are VERL's GAE over the trained tokens of each row, whitened over those of the step, as VERL
does it. Credit gives returns per call, G_k; as rewards these are G_k - G_{k+1} at the last token of call k and G_n at
that of the row's last call, so that with gamma = 1 what follows a token of call k sums to G_k, whichever credit was
configured.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace as changed
from torch.nn.utils.rnn import pad_sequence

from agl.errors import ConfigError
from agl_algo_verl.advantages import advantages
from agl_algo_verl.rows import spread
from agl_algo_verl.typed import floats, verl_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.schemas import CallCredit
    from agl_algo_verl.rows import PreparedStep, RowSample
    from agl_algo_verl.settings import AlgorithmKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """The KL penalty of a step: `rewards` per token of each sample, 0 or as penalised, all [R]; `kl` per token."""

    rewards: list[Tensor]
    kl: float


def penalise(samples: Sequence[RowSample], *, settings: AlgorithmKeys, beta: float) -> KlPenalty:
    """Return `-beta * KL` of every trained token, by VERL's estimate of the KL; rows need `old` and `reference`."""
    function = verl_part("verl.trainer.ppo.core_algos:kl_penalty")
    found = [function(sample.old, sample.reference, kl_penalty=settings.kl_penalty) * sample.mask for sample in samples]
    tokens = sum(sample.trained_tokens for sample in samples)
    total = sum(float(kl_R.sum()) for kl_R in found)
    return KlPenalty(rewards=[-beta * kl_R for kl_R in found], kl=total / max(1, tokens))


def with_penalty(
    prepared: PreparedStep, samples: Sequence[RowSample], *, penalty: KlPenalty, settings: AlgorithmKeys
) -> list[RowSample]:
    """Return the samples with advantages of rollouts whose scores are less the penalty of all their tokens.

    Raises ConfigError where credit gave finished advantages, from which nothing can be taken off.
    """
    lost: defaultdict[str, float] = defaultdict(float)
    for sample, rewards_R in zip(samples, penalty.rewards, strict=True):
        lost[sample.rollout] += sum(floats(rewards_R))
    credits = [
        [_with_penalty(call, lost[rollout]) for call in calls]
        for (rollout, _), calls in zip(prepared.rollouts, prepared.credits, strict=True)
    ]
    found = advantages(credits, groups=[group for _, group in prepared.rollouts], settings=settings)
    by_rollout = {rollout: values for (rollout, _), values in zip(prepared.rollouts, found, strict=True)}
    return [_spread(sample, by_rollout[sample.rollout]) for sample in samples]


def _with_penalty(call: CallCredit, penalty: float) -> CallCredit:
    if call.is_advantage:
        raise ConfigError(
            "algorithm.use_kl_in_reward takes a penalty off returns, and the configured credit gives finished "
            "advantages. Use actor_rollout_ref.actor.use_kl_loss = true, or a credit of returns such as "
            '[credit] use = "turn".'
        )
    return changed(call, value=call.value + penalty)


def _spread(sample: RowSample, values: Mapping[str, float]) -> RowSample:
    return replace(sample, advantages=spread(values, calls=sample.calls, length=len(sample.mask)))


def with_values(
    prepared: PreparedStep, samples: Sequence[RowSample], *, penalty: KlPenalty | None, settings: AlgorithmKeys
) -> list[RowSample]:
    """Return samples with advantages and returns from their critic's `values`, by VERL's GAE.

    Raises ConfigError where credit gave finished advantages, for the critic would be ignored.
    """
    if not samples:
        return []
    returns = call_returns(prepared)
    taken = penalty.rewards if penalty else [torch.zeros(len(sample.mask)) for sample in samples]
    rewards = [call_rewards(s, returns[s.rollout]) + lost_R for s, lost_R in zip(samples, taken, strict=True)]
    advantages_B_R, returns_B_R = gae(samples, rewards, gamma=settings.gamma, lam=settings.lam)
    return [
        replace(sample, advantages=found_R[: len(sample.mask)].float(), returns=target_R[: len(sample.mask)].float())
        for sample, found_R, target_R in zip(samples, advantages_B_R, returns_B_R, strict=True)
    ]


def gae(samples: Sequence[RowSample], rewards: Sequence[Tensor], *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return VERL's whitened advantages and returns of rows with `values`, both [B, R], float64, 0 where untrained.

    Whitening needs two trained tokens; a single one gets the advantage 0.
    """
    values_B_R = pad_sequence([_present(sample.values) for sample in samples], batch_first=True).double()
    mask_B_R = pad_sequence([sample.mask for sample in samples], batch_first=True).double()
    rewards_B_R = pad_sequence(list(rewards), batch_first=True).double()
    if float(mask_B_R.sum()) < 2:
        return torch.zeros_like(values_B_R), rewards_B_R * mask_B_R
    advantages_B_R, returns_B_R = verl_part("verl.trainer.ppo.core_algos:compute_gae_advantage_return")(
        token_level_rewards=rewards_B_R, values=values_B_R, response_mask=mask_B_R, gamma=gamma, lam=lam
    )
    return advantages_B_R * mask_B_R, returns_B_R * mask_B_R


def call_returns(prepared: PreparedStep) -> dict[str, dict[str, float]]:
    """Return what credit gave each call, by rollout and span id.

    Raises ConfigError where credit gave finished advantages, for the critic would be ignored.
    """
    return {
        rollout: {call.span_id: _return_of(call) for call in calls}
        for (rollout, _), calls in zip(prepared.rollouts, prepared.credits, strict=True)
    }


def call_rewards(sample: RowSample, returns: Mapping[str, float]) -> Tensor:
    """Return the reward at each token of a response, [R]; `returns` are by span id."""
    rewards_R = torch.zeros(len(sample.mask), dtype=torch.float64)
    parts = sorted((call for call in sample.calls if call[2] > 0), key=lambda call: call[1])
    for index, (span_id, _, stop) in enumerate(parts):
        later = returns[parts[index + 1][0]] if index + 1 < len(parts) else 0.0
        rewards_R[stop - 1] += returns[span_id] - later
    return rewards_R


def value_fit(samples: Sequence[RowSample]) -> dict[str, float]:
    """Return the mean value and how much of the returns' variance the critic explains, over trained tokens."""
    if not samples:
        return {}
    values_M = torch.cat([_present(s.values)[s.mask] for s in samples]).double()
    returns_M = torch.cat([_present(s.returns)[s.mask] for s in samples]).double()
    spread_of = float(returns_M.var(correction=0))
    share = 1.0 - float((returns_M - values_M).var(correction=0)) / spread_of if spread_of > 0 else 0.0
    return {"value": float(values_M.mean()), "explained_variance": share}


def logprob_gaps(samples: Sequence[RowSample]) -> dict[str, float]:
    """Return how far the engine's log-probabilities are from the recorded ones, over trained tokens."""
    found = [abs(x) for s in samples if s.old is not None for x in floats((s.old - s.behaviour)[s.mask])]
    return {"logprob_gap": max(found, default=0.0), "logprob_gap_mean": sum(found) / max(1, len(found))}


def _return_of(call: CallCredit) -> float:
    if call.is_advantage:
        raise ConfigError(
            'algorithm.adv_estimator = "gae" takes the critic\'s values off returns, and the configured credit gives '
            'finished advantages. Use a credit of returns, such as [credit] use = "turn", or the estimator "grpo".'
        )
    return call.value


def _present(values: Tensor | None) -> Tensor:
    if values is None:
        raise AssertionError("the critic has seen every row")
    return values
