"""Registers the losses and estimators of this distribution, without importing torch.

The hooks are marked optional, because the core does not know them; only `agl_objectives.registry` calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import hookimpl
from agl_objectives.entries import EstimatorEntry, LossEntry

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl(optionalhook=True)
def agl_losses() -> Iterable[LossEntry]:
    """Yield the losses of this distribution."""
    yield LossEntry(
        name="ppo-clip", factory="agl_objectives.losses:PPOClip", summary="PPO's clipped objective, two bounds"
    )
    yield LossEntry(
        name="gspo",
        factory="agl_objectives.losses:GSPO",
        summary="the clipped objective with one ratio per rollout (GSPO)",
        aggregation="sequence",
        surveys_ratios=True,
    )
    yield LossEntry(
        name="gmpo",
        factory="agl_objectives.losses:GMPO",
        summary="the geometric mean of a rollout's clipped ratios (GMPO)",
        aggregation="sequence",
        surveys_ratios=True,
    )
    yield LossEntry(
        name="cispo", factory="agl_objectives.losses:CISPO", summary="bounded weights that carry no gradient (CISPO)"
    )
    yield LossEntry(
        name="sapo",
        factory="agl_objectives.losses:SAPO",
        summary="a soft gate in place of the clip (SAPO)",
        aggregation="sequence",
    )
    yield LossEntry(
        name="clip-cov",
        factory="agl_objectives.losses:ClipCov",
        summary="no gradient for some tokens that cost entropy (Clip-Cov)",
    )
    yield LossEntry(
        name="kl-cov",
        factory="agl_objectives.losses:KLCov",
        summary="a penalty on the tokens that cost most entropy (KL-Cov)",
        trains_silent=True,
        needs_updates=True,
    )
    yield LossEntry(
        name="dppo", factory="agl_objectives.losses:DPPO", summary="a trust region by divergence of each token (DPPO)"
    )
    yield LossEntry(name="gpg", factory="agl_objectives.losses:gpg", summary="the plain policy gradient (GPG)")
    yield LossEntry(
        name="dro",
        factory="agl_objectives.losses:DRO",
        summary="the policy gradient with a quadratic bound (DRO)",
        trains_silent=True,
    )


@hookimpl(optionalhook=True)
def agl_estimators() -> Iterable[EstimatorEntry]:
    """Yield the advantage estimators of this distribution."""
    home = "agl_objectives.estimators"
    yield EstimatorEntry(name="grpo", factory=f"{home}:grpo", summary="less the group's mean, over its deviation")
    yield EstimatorEntry(name="dr_grpo", factory=f"{home}:dr_grpo", summary="less the group's mean")
    yield EstimatorEntry(name="rloo", factory=f"{home}:rloo", summary="less the mean of the others in the group")
    yield EstimatorEntry(name="opo", factory=f"{home}:opo", summary="less the group's mean, weighted by tokens")
    yield EstimatorEntry(name="gpg", factory=f"{home}:gpg", summary="less the group's mean, times S / S that scored")
    yield EstimatorEntry(name="grpo_passk", factory=f"{home}:grpo_passk", summary="the best of a group less the second")
    yield EstimatorEntry(
        name="remax", factory=f"{home}:remax", summary="less the reward of a greedy rollout", needs_baseline=True
    )
    yield EstimatorEntry(
        name="reinforce++",
        factory=f"{home}:reinforce_plus_plus",
        summary="whitened over the batch",
        compares="batch",
    )
    yield EstimatorEntry(
        name="reinforce++-baseline",
        factory=f"{home}:reinforce_plus_plus_baseline",
        summary="less the group's mean, over the batch's deviation",
    )
