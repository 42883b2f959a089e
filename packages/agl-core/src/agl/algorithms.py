"""The configuration of algorithms and other components by name, as an experiment file and Python both build it.

``agl.Trainer(algorithm=agl.VERL(config))`` reads as if VERL were here and imports nothing heavy: the trainer's plugin
manager finds the component by its name, and a package that is not installed is named with its ``pip install`` line.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from agl.errors import ConfigError
from agl.schemas import Json, Record

__all__ = [
    "APO",
    "DPO",
    "GEPA",
    "GRPO",
    "PPO",
    "SFT",
    "VERL",
    "AlgorithmConfig",
    "ComponentConfig",
    "PlacementConfig",
    "algorithm",
    "component",
]


class PlacementConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[algorithm.resources]``, ``[runner.resources]``: the part of a cluster that a process gets.

    Attributes:
        num_cpus: CPUs, in fractions too; by default 1 for an algorithm and 0.5 for a worker.
        num_gpus: GPUs; the process sees no others.
        memory: Memory, such as ``4GB``; ``""`` to reserve none.
        custom: Resources that the cluster's machines have by name, such as ``{ browser = 1 }``.
        strategy: ``PACK`` for few machines and ``SPREAD`` for many; ``STRICT_PACK`` and ``STRICT_SPREAD``, which only
            algorithms have, refuse what does not go on one machine, or on one machine each.
    """

    num_cpus: float | None = None
    num_gpus: float = 0.0
    memory: str = ""
    custom: dict[str, float] = {}
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"


class ComponentConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A component by name: ``[credit]``, ``[[reward]]``.

    Attributes:
        use: The name that a plugin registered, such as ``turn``; for a reward also ``module:attribute``.
        params: Keyword arguments of its factory.
    """

    use: str
    params: dict[str, Json] = {}


class AlgorithmConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An algorithm by name, and its place in the experiment: ``[[algorithm]]``.

    Attributes:
        use: The name that a plugin registered, such as ``grpo``.
        tunes: Names of the resources that it tunes; empty for the only one that it can tune.
        name: Its name within the experiment; ``use`` unless given.
        agents: Regular expression over the names of agents, nodes and roles whose calls it trains; ``""`` for all.
        source: Names of the algorithms whose rollouts it learns from instead of collecting its own, or
            ``experiment:NAME`` for the finished ones of another experiment in the store.
        credit: Its own credit assignment; ``None`` for the experiment's.
        resources: The part of the runner's cluster in which its steps run; ``None`` for the experiment's own process.
        params: Keyword arguments of its factory.
    """

    use: str
    tunes: tuple[str, ...] = ()
    name: str = ""
    agents: str = ""
    source: tuple[str, ...] = ()
    credit: ComponentConfig | None = None
    resources: PlacementConfig | None = None
    params: dict[str, Json] = {}

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.use)


def component(use: str, /, **params: Json) -> ComponentConfig:
    """A component by its registered name: ``component("turn", gamma=0.9)``."""
    return ComponentConfig(use=use, params=params)


def algorithm(
    use: str,
    config: Mapping[str, Json] | None = None,
    /,
    *,
    tunes: str | Iterable[str] = (),
    name: str = "",
    agents: str = "",
    source: str | Iterable[str] = (),
    credit: str | ComponentConfig | None = None,
    resources: PlacementConfig | None = None,
    **params: Json,
) -> AlgorithmConfig:
    """An algorithm of any plugin by its registered name: ``algorithm("rft", tunes="writer", min_reward=1.0)``.

    Args:
        use: The registered name, such as ``"grpo"``; ``agl plugins list`` prints all.
        config: Its parameters as one mapping, besides those given as keyword arguments.
        tunes: The resource or resources that it tunes; by default the only one that it can tune.
        name: Its name within the experiment, where two are of one kind.
        agents: Regular expression for the agents whose calls it trains.
        source: The algorithm or algorithms whose rollouts it learns from, instead of collecting its own.
        credit: Its own credit assignment, such as ``component("turn", gamma=0.9)``; by default the trainer's.
        resources: The part of the runner's cluster in which its steps run; by default the trainer's process.
        params: Its parameters.

    Raises:
        ConfigError: A parameter is given twice.
    """
    twice = sorted(set(config or ()) & params.keys())
    if twice:
        raise ConfigError(f"the algorithm {use!r} gets {twice} both in its mapping and as a keyword; give each once")
    return AlgorithmConfig(
        use=use,
        tunes=(tunes,) if isinstance(tunes, str) else tuple(tunes),
        name=name,
        agents=agents,
        source=(source,) if isinstance(source, str) else tuple(source),
        credit=component(credit) if isinstance(credit, str) else credit,
        resources=resources,
        params={**(config or {}), **params},
    )


def SFT(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802  # a name in capitals, like those below
    """Supervised fine-tuning, from ``agl-algo-torch``; takes what :func:`algorithm` takes."""
    return algorithm("sft", config, **settings)


def GRPO(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Group-relative policy optimisation, from ``agl-algo-torch``; takes what :func:`algorithm` takes."""
    return algorithm("grpo", config, **settings)


def PPO(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Proximal policy optimisation, from ``agl-algo-torch``; takes what :func:`algorithm` takes."""
    return algorithm("ppo", config, **settings)


def DPO(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Direct preference optimisation, from ``agl-algo-torch``; takes what :func:`algorithm` takes."""
    return algorithm("dpo", config, **settings)


def VERL(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """VERL at scale, from ``agl-algo-verl``: ``agl.VERL({"algorithm": {"adv_estimator": "grpo"}, ...})``.

    ``config`` has VERL's own keys; ``settings`` are what :func:`algorithm` takes.
    """
    return algorithm("verl", config, **settings)


def APO(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Automatic prompt optimisation, from ``agl-algo-apo``; takes what :func:`algorithm` takes."""
    return algorithm("apo", config, **settings)


def GEPA(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Reflective prompt evolution, from ``agl-algo-apo``; takes what :func:`algorithm` takes."""
    return algorithm("gepa", config, **settings)
