"""Imports public names on first use, so that importing a package stays cheap."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make a ``__getattr__`` for a package, which imports a name on first use and then caches it on the package.

    Args:
        package: The package's ``__name__``.
        homes: The names to offer, by the module that defines them.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        # Cached on the package, so that Python calls its __getattr__ only once for each name.
        setattr(sys.modules[package], name, value)
        return value

    return get
