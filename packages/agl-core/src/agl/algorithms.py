"""The configuration of algorithms and other components by name, for experiment files and for Python.

``agl.Trainer(algorithm=agl.VERL(config))`` reads as if VERL were here, but imports nothing heavy: the trainer's plugin
manager finds the component by its name. If its package is not installed, the error has the ``pip install`` line.
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
        num_cpus: Number of CPUs, which may be fractional; by default 1 for an algorithm and 0.5 for a worker.
        num_gpus: Number of GPUs; the process sees no others.
        memory: Memory, such as ``4GB``; ``""`` to reserve none.
        custom: Amounts of the cluster's custom resources, by name, such as ``{ browser = 1 }``.
        strategy: ``PACK`` to use few machines, ``SPREAD`` to use many. Algorithms may also use ``STRICT_PACK``, which
            fails unless everything fits on one machine, and ``STRICT_SPREAD``, which fails unless every part gets a
            machine of its own.
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
        params: Keyword arguments of the component's factory.
    """

    use: str
    params: dict[str, Json] = {}


class AlgorithmConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An algorithm by name, with its settings in the experiment: ``[[algorithm]]``.

    Attributes:
        use: The name that a plugin registered, such as ``grpo``.
        tunes: Names of the resources that the algorithm tunes; may be empty if it can tune only one of them.
        name: The algorithm's name within the experiment; by default the value of ``use``.
        agents: Regular expression for the names of agents, nodes and roles whose calls train; ``""`` for all.
        source: Names of other algorithms from whose rollouts this one learns instead of collecting rollouts itself, or
            ``experiment:NAME`` for the finished rollouts of another experiment in the store.
        credit: A credit assignment for this algorithm alone; ``None`` for that of the experiment.
        resources: The cluster share for the algorithm's steps; ``None`` to run them in the experiment's own process.
        params: Keyword arguments of the algorithm's factory.
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
    """Configure a component by its registered name: ``component("turn", gamma=0.9)``."""
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
    """Configure an algorithm by its registered name: ``algorithm("rft", tunes="writer", min_reward=1.0)``.

    Args:
        use: The registered name, such as ``"grpo"``; ``agl plugins list`` prints all names.
        config: Parameters of the algorithm as a mapping, in addition to ``params``.
        tunes: The resource or resources that the algorithm tunes; by default the only one that it can tune.
        name: The algorithm's name within the experiment; needed if the experiment uses one algorithm twice.
        agents: Regular expression for the agents whose calls train.
        source: The algorithm or algorithms from whose rollouts this one learns, instead of collecting rollouts itself.
        credit: A credit assignment for this algorithm alone, such as ``component("turn", gamma=0.9)``; by default that
            of the trainer.
        resources: The cluster share for the algorithm's steps; by default they run in the trainer's process.
        params: Parameters of the algorithm.

    Raises:
        ConfigError: A parameter is both in ``config`` and in ``params``.
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
    """Supervised fine-tuning, from ``agl-algo-torch``; see :func:`algorithm` for the arguments."""
    return algorithm("sft", config, **settings)


def GRPO(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Group-relative policy optimisation, from ``agl-algo-torch``; see :func:`algorithm` for the arguments."""
    return algorithm("grpo", config, **settings)


def PPO(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Proximal policy optimisation, from ``agl-algo-torch``; see :func:`algorithm` for the arguments."""
    return algorithm("ppo", config, **settings)


def DPO(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Direct preference optimisation, from ``agl-algo-torch``; see :func:`algorithm` for the arguments."""
    return algorithm("dpo", config, **settings)


def VERL(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """VERL at scale, from ``agl-algo-verl``: ``agl.VERL({"algorithm": {"adv_estimator": "grpo"}, ...})``.

    ``config`` has VERL's own keys; ``settings`` are the keyword arguments of :func:`algorithm`.
    """
    return algorithm("verl", config, **settings)


def APO(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Automatic prompt optimisation, from ``agl-algo-apo``; see :func:`algorithm` for the arguments."""
    return algorithm("apo", config, **settings)


def GEPA(config: Mapping[str, Json] | None = None, /, **settings: Any) -> AlgorithmConfig:  # noqa: N802
    """Reflective prompt evolution, from ``agl-algo-apo``; see :func:`algorithm` for the arguments."""
    return algorithm("gepa", config, **settings)
