"""Specifications: a component's name and parameters, to be resolved later by the trainer's plugin manager.

``agl.Trainer(algorithm=agl.VERL(config))`` reads as if VERL were here, imports nothing heavy, and a package that is
not installed is named together with its ``pip install`` line when the trainer is made.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from agl._entries import Kind
from agl.errors import ConfigError
from agl.schemas import Record


class Spec(Record, frozen=True, kw_only=True):
    """A component by name.

    Attributes:
        kind: Which kind of component.
        name: As registered by a plugin, such as ``grpo``.
        params: Keyword arguments of its factory.
    """

    kind: Kind
    name: str
    params: dict[str, Any] = {}


class AlgorithmSpec(Spec, frozen=True, kw_only=True):
    """An algorithm by name.

    Attributes:
        tunes: Names of the resources that it tunes; empty for the only one that it can tune.
        agents: Pattern of the agents whose calls it trains; ``""`` for all.
        source: Labels of the algorithms whose rollouts it learns from; empty for its own.
        label: Its name within the experiment; ``""`` for the registered one.
        credit: Its own credit assignment; ``None`` for the experiment's.
    """

    kind: Kind = "algorithm"
    tunes: tuple[str, ...] = ()
    agents: str = ""
    source: tuple[str, ...] = ()
    label: str = ""
    credit: Spec | None = None


def Algorithm(  # noqa: N802  # reads as the thing that it stands for, like those below
    name: str,
    config: Mapping[str, Any] | None = None,
    /,
    *,
    tunes: str | Iterable[str] = (),
    agents: str = "",
    source: str | Iterable[str] = (),
    label: str = "",
    credit: str | Spec | None = None,
    **params: Any,
) -> AlgorithmSpec:
    """The algorithm of any plugin by its registered name.

    Args:
        name: Such as ``"grpo"``; ``agl plugins list`` prints them.
        config: Its parameters as one mapping; or pass them as keyword arguments, but not one in both ways.
        tunes: The resource or resources that it tunes.
        agents: Regular expression for the agents whose calls it trains.
        source: Label or labels of the algorithms whose rollouts it learns from, instead of collecting its own.
        label: Its name within the experiment, where two are of one kind.
        credit: Its own credit assignment, such as ``agl.Credit("turn", gamma=0.9)``; by default the trainer's.
        params: Its parameters.
    """
    both = sorted(set(config or ()) & params.keys())
    if both:
        raise ConfigError(f"the algorithm {name!r} gets {both} both in its mapping and as keyword; give each once")
    names = (tunes,) if isinstance(tunes, str) else tuple(tunes)
    sources = (source,) if isinstance(source, str) else tuple(source)
    return AlgorithmSpec(
        name=name,
        params={**(config or {}), **params},
        tunes=names,
        agents=agents,
        source=sources,
        label=label,
        credit=Credit(credit) if isinstance(credit, str) else credit,
    )


def Policy(name: str, /, **params: Any) -> Spec:  # noqa: N802
    """A model server: ``agl.Policy("torch", model="Qwen/Qwen2.5-0.5B-Instruct")``."""
    return Spec(kind="policy", name=name, params=params)


def Runner(name: str, /, **params: Any) -> Spec:  # noqa: N802
    """A runner: ``agl.Runner("process", concurrency=4)``."""
    return Spec(kind="runner", name=name, params=params)


def Credit(name: str, /, **params: Any) -> Spec:  # noqa: N802
    """A credit assignment: ``agl.Credit("turn", gamma=0.9)``."""
    return Spec(kind="credit", name=name, params=params)


def SFT(config: Mapping[str, Any] | None = None, /, **params: Any) -> AlgorithmSpec:  # noqa: N802
    """Supervised fine-tuning; from ``agl-algo-torch``."""
    return Algorithm("sft", config, **params)


def GRPO(config: Mapping[str, Any] | None = None, /, **params: Any) -> AlgorithmSpec:  # noqa: N802
    """Group-relative policy optimisation; from ``agl-algo-torch``."""
    return Algorithm("grpo", config, **params)


def PPO(config: Mapping[str, Any] | None = None, /, **params: Any) -> AlgorithmSpec:  # noqa: N802
    """Proximal policy optimisation; from ``agl-algo-torch``."""
    return Algorithm("ppo", config, **params)


def DPO(config: Mapping[str, Any] | None = None, /, **params: Any) -> AlgorithmSpec:  # noqa: N802
    """Direct preference optimisation; from ``agl-algo-torch``."""
    return Algorithm("dpo", config, **params)


def VERL(config: Mapping[str, Any] | None = None, /, **params: Any) -> AlgorithmSpec:  # noqa: N802
    """VERL at scale: ``agl.VERL({"algorithm": {"adv_estimator": "grpo"}, ...})``; from ``agl-algo-verl``."""
    return Algorithm("verl", config, **params)


def APO(config: Mapping[str, Any] | None = None, /, **params: Any) -> AlgorithmSpec:  # noqa: N802
    """Automatic prompt optimisation; from ``agl-algo-apo``."""
    return Algorithm("apo", config, **params)


def GEPA(config: Mapping[str, Any] | None = None, /, **params: Any) -> AlgorithmSpec:  # noqa: N802
    """Reflective prompt evolution; from ``agl-algo-apo``."""
    return Algorithm("gepa", config, **params)
