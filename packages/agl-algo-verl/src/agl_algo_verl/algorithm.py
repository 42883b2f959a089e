"""The algorithm `verl`, built for the engine that the experiment asks for."""

from __future__ import annotations

from typing import Any

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_objectives.reports import MAX_NONFINITE

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
    mask_truncated: bool = False,
    max_nonfinite: int = MAX_NONFINITE,
    entropy: bool | None = None,
    probe: bool | None = None,
    **config: Any,
) -> Any:
    """Return the algorithm of an engine.

    Args:
        engine: `inproc` trains in this process, `ray` with VERL's trainer on a Ray cluster.
        threads: Torch's threads on the CPU; 0 leaves torch's, and is one in each process of a cluster.
        keep: Number of checkpoints and published weights that stay on disk.
        loss: A loss of agl-objectives or a plugin in place of VERL's keys; `loss_params` are its parameters.
        estimator: The same for an estimator, with `estimator_params`.
        refill: Most rounds in which a step replaces silent groups by those of further tasks; 0 for none.
        curriculum: `frontier` or `unsolved`: the tasks to prefer. At least the share `curriculum_uniform` is drawn
            without preference.
        replay: Share of a step's trained rollouts that earlier steps have trained on already, at most
            `replay_max_staleness` versions of the policy before; 0 for none.
        anchor_coef: Weight of a KL penalty on the calls of agents that share the weights and are not trained; 0.1
            unless given.
        save_every: Steps between two checkpoints, a time such as `"60s"`, or the largest share of the time that may go
            into saving; `"5%"` unless given.
        mask_truncated: Whether calls that were cut at a limit of tokens are left out of the loss.
        max_nonfinite: Updates in a row, on a cluster steps, that are left out for a gradient that is not finite; one
            more ends the run.
        entropy: With `inproc`, whether the entropies of tokens are computed and recorded; they are unless it is false.
        probe: With `ray`, whether a probe is put beside the weights, for policies such as `vllm` that check what they
            serve; one is unless it is false.
        config: VERL's own keys, by their groups.

    Raises:
        ConfigError: The engine is unknown, the configuration wrong, or VERL missing or too new.
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
        "entropy": entropy,
        "probe": probe,
    }
    for name, value, place in (("entropy", entropy, "inproc"), ("probe", probe, "ray")):
        if value is not None and engine in ENGINES and engine != place:
            raise ConfigError(f'verl got {name} = {value}, which has no effect with engine = "{engine}"; remove it.')
    config |= {name: value for name, value in beside.items() if value is not None}
    config |= {"mask_truncated": mask_truncated, "max_nonfinite": max_nonfinite}
    if engine == "inproc":
        from agl_algo_verl.local.trainer import VERL

        return VERL(threads=threads, keep=keep, **config)
    if engine == "ray":
        from agl_algo_verl.ray.trainer import RayVERL

        return RayVERL(threads=threads, keep=keep, **config)
    hint = did_you_mean(engine, ENGINES, otherwise=f"use one of: {', '.join(ENGINES)}.")
    raise ConfigError(f"verl got engine = {engine!r}; {hint}")
