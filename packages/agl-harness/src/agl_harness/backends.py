"""Finds the backend of sandboxes that an experiment names."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_harness.isolation import Kind
from agl_harness.local import LocalSandboxes
from agl_harness.sandbox import Sandboxes
from agl_inspect.keys import state_dir

GROUP = "agl_sandboxes"
"""The entry-point group of packages that bring a backend."""


def private_folders() -> list[Path]:
    """Return the folders of this user that no sandbox sees: the home folder, and that of agl's signing key."""
    return [Path.home(), state_dir()]


def build_sandboxes(
    name: str,
    *,
    base: Path,
    hidden: Sequence[Path],
    isolation: Kind,
    readable: Sequence[Path] = (),
    params: Mapping[str, Any] | None = None,
) -> Sandboxes:
    """Build the backend of a name.

    Args:
        name: ``local``, a name in the entry-point group, or ``module:attribute``.
        base: The folder for what it keeps on this machine.
        hidden: Folders that nothing in a sandbox may see.
        readable: Files and folders within those that it may read nevertheless.
        isolation: For ``local``.
        params: Further arguments of the backend.

    Raises:
        ConfigError: There is no such backend, it cannot be imported, or it does not take an argument.
    """
    if name == "local":
        if params:
            raise ConfigError(f'sandbox_params has {sorted(params)}, and sandbox = "local" takes none; remove them')
        return LocalSandboxes(base=base, hidden=hidden, readable=readable, isolation=isolation)
    if isolation != "auto":
        raise ConfigError(f'isolation is for sandbox = "local", and it is {name!r}; remove isolation')
    factory = _factory(name)
    try:
        return factory(base=base, hidden=tuple(hidden), readable=tuple(readable), **(params or {}))
    except TypeError as error:
        raise ConfigError(f"the sandbox {name!r} does not take sandbox_params: {error}; correct them") from error


def _factory(name: str) -> Callable[..., Any]:
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    try:
        if name in found:
            return found[name].load()
        if ":" in name:
            module, _, attribute = name.partition(":")
            return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the sandbox {name!r} cannot be imported: {error}; install its package") from error
    known = ["local", *sorted(found)]
    hint = did_you_mean(name, known, otherwise=f"there are {', '.join(known)}")
    raise ConfigError(f"there is no sandbox {name!r}; {hint}. For one of your own write 'module:attribute'")
