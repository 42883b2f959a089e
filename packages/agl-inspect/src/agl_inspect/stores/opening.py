"""Opens stores, and refuses one that lacks a part of the contract, such as a plugin that is older than agl-core.

Only methods and their keyword arguments are compared. That they do what the contract says is for
``agl_testing.StoreConformance`` to find out.
"""

import inspect
from collections.abc import Callable
from importlib.metadata import distributions
from typing import Any

from agl import PluginManager
from agl.contracts import Store
from agl.errors import PluginError

_METHODS: dict[str, Callable[..., Any]] = {
    name: method for name, method in vars(Store).items() if inspect.isfunction(method) and not name.startswith("_")
}


def build_store(manager: PluginManager, url: str) -> Store:
    """Open the store of a URL.

    Raises:
        ConfigError: No plugin has a store of that scheme, or the store cannot use the URL.
        PluginError: The store lacks a part of the contract.
    """
    return checked_store(manager.build(manager.store_entry(url.partition("://")[0]), url=url))


def checked_store(store: Any) -> Store:
    """Return a store; raises :class:`PluginError` that names what it lacks of the contract."""
    lacks = [text for name, method in _METHODS.items() if (text := _lacking(store, name, method))]
    if lacks:
        origin = _distribution(store) or f"the module {type(store).__module__}"
        raise PluginError(
            f"the store {type(store).__name__} of {origin} was written for another version of agl-core: it has no "
            f"{', no '.join(lacks)}. Upgrade it, or use another store; its author adds what is missing, or gets it "
            "from agl.stores.TableStore as a base class, and checks all with agl_testing.StoreConformance"
        )
    return store


def _lacking(store: Any, name: str, method: Callable[..., Any]) -> str:
    """Return the part of a method that a store lacks, ``""`` if it lacks none."""
    own = getattr(store, name, None)
    if not callable(own):
        return f"{name}()"
    try:
        known = inspect.signature(own).parameters.values()
    except ValueError:  # one that is written in C has no signature
        return ""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
        return ""
    names = {parameter.name for parameter in known}
    wanted = (p.name for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY)
    absent = [f"{each}=..." for each in wanted if each not in names]
    return f"{name}({', '.join(absent)})" if absent else ""


def _distribution(store: Any) -> str:
    """Return the distribution, with its version, whose plugin a store's class comes from; ``""`` if there is none."""
    top = type(store).__module__.partition(".")[0]
    for found in distributions():
        if any(point.module.partition(".")[0] == top for point in found.entry_points.select(group="agl")):
            return f"{found.name} {found.version}"
    return ""
