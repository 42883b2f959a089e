"""Checks the types of a trainer's arguments, before any of them is read as a section of an experiment."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from agl import PluginManager
from agl.algorithms import ComponentConfig
from agl.errors import ConfigError
from agl_run.config.records import GatewayConfig, PolicyConfig, RunnerConfig, ScheduleConfig
from agl_run.display.progress import Progress

_SHOWN = 60
"""Characters of a value that a message shows."""


@dataclass(frozen=True, kw_only=True)
class _Takes:
    """The values that an argument takes: one item, one or a sequence of several, or items by name."""

    shape: Literal["one", "several", "named"]
    fits: Callable[[Any], bool]
    words: str


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _with(contract: type) -> Callable[[Any], bool]:
    """Return a check for objects, not classes, with the public methods of a contract."""
    names = [name for name in vars(contract) if not name.startswith("_")]
    return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _is_store(value: Any) -> bool:
    """Return true for a URL and for what has the beginnings of a store; opening it says what one of those lacks."""
    return isinstance(value, str) or (not isinstance(value, type) and hasattr(value, "enqueue"))


def _anything(_: Any) -> bool:
    return True


_COMPONENT = "agl.algorithms.component(NAME, ...)"

_TAKES = {
    "algorithm": _Takes(shape="several", fits=_anything, words=""),  # the trainer says more about these two
    "rewards": _Takes(shape="several", fits=_anything, words=""),
    "adapter": _Takes(shape="named", fits=_of(str), words='{"agent_match": "write|rewrite"}'),
    "initial_resources": _Takes(
        shape="named", fits=_anything, words='resources by name, such as {"prompt": agl.PromptTemplate(template=...)}'
    ),
    "policies": _Takes(
        shape="named",
        fits=_of(str, PolicyConfig),
        words='model servers by name, such as {"main_llm": agl_run.policy("torch", model=...)}; an agl.LLM that runs '
        "elsewhere belongs to initial_resources",
    ),
    "store": _Takes(shape="one", fits=_is_store, words='a URL, such as "sqlite:///runs.db", or a store object'),
    "runner": _Takes(
        shape="one", fits=_of(str, RunnerConfig), words='a name, or agl_run.runner("process", timeout_s=60)'
    ),
    "credit": _Takes(shape="one", fits=_of(str, ComponentConfig), words=f"a name, or {_COMPONENT}"),
    "tracers": _Takes(shape="several", fits=_of(str), words='names, such as ("langchain",)'),
    "schedule": _Takes(
        shape="one",
        fits=_of(str, ScheduleConfig),
        words='"sequential", "alternate" or "concurrent", or agl_run.ScheduleConfig(mode="alternate", every=2)',
    ),
    "gateway": _Takes(
        shape="one", fits=_of(str, GatewayConfig), words='"auto" or "none", or agl_run.GatewayConfig(use=..., ...)'
    ),
    "exporters": _Takes(shape="several", fits=_of(str, ComponentConfig), words=f"names, or {_COMPONENT}"),
    "disabled_plugins": _Takes(shape="several", fits=_of(str), words="names of plugins or distributions"),
    "progress": _Takes(shape="one", fits=_with(Progress), words="an object with say, update and close"),
    "plugins": _Takes(shape="one", fits=_of(PluginManager), words="an agl.PluginManager"),
    "folder": _Takes(shape="one", fits=_of(str, os.PathLike), words="a path"),
}
_OPTIONAL = frozenset({"adapter", "initial_resources", "policies", "progress", "plugins"})


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check the types of a trainer's arguments.

    Raises:
        ConfigError: One has a wrong type; names the argument, the value, its type and what the argument takes.
    """
    for name, takes in _TAKES.items():
        if name in given and not (given[name] is None and name in _OPTIONAL):
            for place, value in _misfits(name, given[name], takes):
                raise ConfigError(f"{place} is {_shown(value)}, {_kind(value)}; give {takes.words}")


def _misfits(name: str, value: Any, takes: _Takes) -> Iterator[tuple[str, Any]]:
    """Yield the places at which a value is wrong."""
    if takes.shape == "named":
        if not isinstance(value, Mapping):
            yield name, value
            return
        for key, item in cast("Mapping[Any, Any]", value).items():
            if not isinstance(key, str):
                yield f"a key of {name}", key
            if not takes.fits(item):
                yield f"{name}[{key!r}]", item
    elif takes.shape == "several" and isinstance(value, Sequence) and not isinstance(value, str):
        items = cast("Sequence[Any]", value)
        yield from ((f"{name}[{place}]", item) for place, item in enumerate(items) if not takes.fits(item))
    elif not takes.fits(value):
        yield name, value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _kind(value: Any) -> str:
    return "a class" if isinstance(value, type) else f"of the type {type(value).__name__}"
