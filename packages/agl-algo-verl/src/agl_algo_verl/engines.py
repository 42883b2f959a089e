"""The algorithm `verl`, built for the engine that the experiment asks for."""

from __future__ import annotations

from typing import Any

from agl.errors import ConfigError
from agl.hints import did_you_mean

ENGINES = ("inproc", "ray")


def make(  # noqa: PLR0913 - one argument per key of the experiment file
    *,
    engine: str = "inproc",
    threads: int = 0,
    keep: int = 2,
    loss: str | None = None,
    loss_params: dict[str, Any] | None = None,
    estimator: str | None = None,
    estimator_params: dict[str, Any] | None = None,
    refill: int | None = None,
    curriculum: str | None = None,
    curriculum_uniform: float | None = None,
    replay: float | None = None,
    replay_max_staleness: int | None = None,
    anchor_coef: float | None = None,
    save_every: int | str | None = None,
    **config: Any,
) -> Any:
    """Return the algorithm: `inproc` trains in this process, `ray` with VERL's trainer on a Ray cluster.

    `loss` and `estimator` name those of agl-objectives, in place of VERL's own keys in `config`. `refill` is the most
    rounds in which silent groups are replaced, `curriculum` the tasks to prefer, with the share `curriculum_uniform`
    drawn without preference. `replay` is the share of a step's trained rollouts that earlier steps have trained on
    already, at most `replay_max_staleness` versions of the policy before. `anchor_coef`, 0.1 unless given, is
    the weight of a KL penalty on the calls of agents that share the weights and are not trained. `save_every` is the
    interval between two saves.
    Raises ConfigError for another engine, a wrong configuration, or a VERL that is missing or too new.
    """
    beside = {
        "loss": loss,
        "loss_params": loss_params,
        "estimator": estimator,
        "estimator_params": estimator_params,
        "refill": refill,
        "curriculum": curriculum,
        "curriculum_uniform": curriculum_uniform,
        "replay": replay,
        "replay_max_staleness": replay_max_staleness,
        "anchor_coef": anchor_coef,
        "save_every": save_every,
    }
    config |= {name: value for name, value in beside.items() if value is not None}
    if engine == "inproc":
        from agl_algo_verl.inproc import VERL

        return VERL(threads=threads, keep=keep, **config)
    if engine == "ray":
        from agl_algo_verl.ray_engine import RayVERL

        return RayVERL(threads=threads, keep=keep, **config)
    hint = did_you_mean(engine, ENGINES, otherwise=f"use one of: {', '.join(ENGINES)}.")
    raise ConfigError(f"verl got engine = {engine!r}; {hint}")
