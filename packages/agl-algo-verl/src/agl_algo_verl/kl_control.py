"""The weight of a KL penalty in the reward, over the steps of a run; VERL's controllers do the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_algo_verl.settings import AlgorithmKeys


class KlController:
    """VERL's controller of the penalty's weight; `value` outlives the process in the algorithm's state."""

    def __init__(self, settings: AlgorithmKeys) -> None:
        """Start at the configured coefficient."""
        self._settings = settings
        self.value = settings.kl_ctrl.kl_coef

    def update(self, *, kl: float, rollouts: int) -> None:
        """Move the weight by what the step's rollouts showed; a fixed one stays."""
        from agl_algo_verl.typed import verl_part

        control = self._settings.kl_ctrl
        config = verl_part("verl.trainer.config:KLControlConfig")(
            type=control.type, kl_coef=self.value, horizon=control.horizon, target_kl=control.target_kl
        )
        controller: Any = verl_part("verl.trainer.ppo.core_algos:get_kl_controller")(config)
        controller.update(current_kl=kl, n_steps=rollouts)
        self.value = float(controller.value)
