"""The weight beta of a KL penalty in the reward, over the steps of a run; VERL's controllers do the arithmetic.

The adaptive one is the proportional controller of Ziegler et al. 2019 (arXiv 1909.08593):

    e    = clip(KL / target_kl - 1, -0.2, 0.2)
    beta = beta * (1 + e * n / horizon)

KL is in nats per token; n, the rollouts of the step, and `horizon` count rollouts. After `horizon` rollouts at 1.2
times the target or more, beta has grown by about a fifth; the clip keeps one step with an odd KL from moving it far.

Deviation from the paper, which measures the KL of whole responses: as in VERL it is per token, so `target_kl` does not
depend on how long answers are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_algo_verl.settings.settings import AlgorithmKeys


class KlController:
    """VERL's controller of the penalty's weight; `value` outlives the process in the algorithm's state."""

    def __init__(self, settings: AlgorithmKeys) -> None:
        """Start at the configured coefficient."""
        self._settings = settings
        self.value = settings.kl_ctrl.kl_coef

    def update(self, *, kl: float, rollouts: int) -> None:
        """Move the weight by the KL of a step of `rollouts` rollouts; a fixed weight stays."""
        from agl_algo_verl.typed import verl_part

        control = self._settings.kl_ctrl
        # VERL's controller is made anew each time, from the current weight: it has no other state, and `value` alone
        # has to be saved.
        config = verl_part("verl.trainer.config:KLControlConfig")(
            type=control.type, kl_coef=self.value, horizon=control.horizon, target_kl=control.target_kl
        )
        controller: Any = verl_part("verl.trainer.ppo.core_algos:get_kl_controller")(config)
        controller.update(current_kl=kl, n_steps=rollouts)  # VERL's `n_steps` are what the paper calls episodes
        self.value = float(controller.value)
