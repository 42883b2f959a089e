"""The algorithm `verl`, built for the engine that the experiment selects; it takes VERL's keys and parameters of agl.

The parameters of agl have the same names and meaning as in `grpo` of agl-algo-torch.
"""

from __future__ import annotations

from typing import Any

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_objectives import settings
from agl_objectives.replay import MAX_STALENESS
from agl_objectives.reports import MAX_NONFINITE
from agl_objectives.settings import Saving, Settings


class Sampling(settings.Sampling, frozen=True, kw_only=True):
    """The choice of tasks, groups and calls.

    Attributes:
        mask_truncated: True to leave calls out of the loss that were cut at a token limit.
    """

    mask_truncated: bool = False


class Replay(Settings, frozen=True, kw_only=True):
    """Rollouts of earlier steps that are trained on again.

    Attributes:
        share: The share of replayed rollouts in a step's trained rollouts; 0 for none.
        max_staleness: The most versions of the policy that a replayed rollout may be behind.
    """

    share: float = 0.0
    max_staleness: int = MAX_STALENESS


SAMPLING, REPLAY, SAVING = Sampling(), Replay(), Saving()

ENGINES = {"inproc": "entropy", "ray": "probe"}
"""The engines, each with the parameter that only this engine reads."""


def make(  # noqa: PLR0913 - one argument per key of the experiment file
    *,
    engine: str = "inproc",
    threads: int = 0,
    loss: str = "",
    loss_params: dict[str, Any] | None = None,
    estimator: str = "",
    estimator_params: dict[str, Any] | None = None,
    sampling: Sampling = SAMPLING,
    replay: Replay = REPLAY,
    saving: Saving = SAVING,
    anchor_coef: float | None = None,
    max_nonfinite: int = MAX_NONFINITE,
    entropy: bool | None = None,
    probe: bool | None = None,
    **config: Any,
) -> Any:
    """Return the algorithm for an engine.

    Args:
        engine: `inproc` trains in this process, `ray` with VERL's trainer on a Ray cluster.
        threads: Torch's threads on the CPU; 0 leaves torch's own number, or means one in each process of a cluster.
        loss: A loss of agl-objectives or a plugin, in place of VERL's keys.
        loss_params: The loss's parameters.
        estimator: An estimator of agl-objectives or a plugin, in place of VERL's keys.
        estimator_params: The estimator's parameters.
        sampling: The choice of tasks, groups and calls: `refill`, `curriculum`, `mask_truncated`.
        replay: Rollouts of earlier steps that are trained on again: `share`, `max_staleness`.
        saving: Saved states: `keep`, `save_every`.
        anchor_coef: Weight of a KL penalty on the calls of agents that share the weights but are not trained; by
            default 0.1.
        max_nonfinite: Consecutive updates (steps, on a cluster) that may be left out because their gradient is not
            finite; one more ends the run.
        entropy: With `inproc`, whether the entropies of tokens are computed and recorded; by default true.
        probe: With `ray`, whether a probe is stored with the weights, for policies such as `vllm` that check the
            weights that they serve; by default true.
        config: VERL's own keys, by their groups.

    Raises:
        ConfigError: The engine is unknown, the configuration wrong, or VERL missing or too new.
    """
    if engine not in ENGINES:
        hint = did_you_mean(engine, ENGINES, otherwise=f"use one of: {', '.join(ENGINES)}.")
        raise ConfigError(f"verl got engine = {engine!r}; {hint}")
    config |= {"threads": threads, "max_nonfinite": max_nonfinite, "loss": loss, "loss_params": loss_params or {}}
    config |= {"sampling": sampling, "replay": replay, "saving": saving}
    config |= {"estimator": estimator, "estimator_params": estimator_params or {}}
    for name, value in {"anchor_coef": anchor_coef, "entropy": entropy, "probe": probe}.items():
        if value is not None and name in ENGINES.values() and name != ENGINES[engine]:
            raise ConfigError(f'verl got {name}, which has no effect with engine = "{engine}"; remove it.')
        if value is not None:
            config[name] = value
    if engine == "inproc":
        from agl_algo_verl.local.trainer import VERL

        return VERL(**config)
    from agl_algo_verl.ray.trainer import RayVERL

    return RayVERL(**config)
