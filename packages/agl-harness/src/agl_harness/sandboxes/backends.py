"""Finds the backend of sandboxes that an experiment names, and the sandbox of an attempt for rewards.

A harness may add spans to its own attempt, with the attempt's token. A gateway removes from these what only a runner
records, and the runner's span comes after them, because it is written when the attempt ends.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from agl import semconv
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Record, Span
from agl_harness.sandboxes.contract import Sandbox, Sandboxes
from agl_harness.sandboxes.isolation import Kind
from agl_harness.sandboxes.local import LocalSandboxes
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
    isolation: Kind = "auto",
    readable: Sequence[Path] = (),
    params: Mapping[str, Any] | None = None,
) -> Sandboxes:
    """Build the backend of a name.

    Args:
        name: ``local``, a name in the entry-point group, or ``module:attribute``.
        base: The folder for its files on this machine.
        hidden: Folders that nothing in a sandbox may see.
        readable: Files and folders within hidden ones that it may read.
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


class Attached(Record, frozen=True, kw_only=True):
    """The sandbox of an attempt, its backend, and the attributes that the runner gave the attempt."""

    sandbox: Sandbox
    sandboxes: Sandboxes
    record: Mapping[str, Any]


async def attach(spans: Sequence[Span], *, reward: str, folder: Path) -> Attached:
    """Return the sandbox that an attempt left, for a reward; new ones of its backend stand next to it.

    Args:
        spans: The spans of the attempt.
        reward: The reward's name.
        folder: The experiment's folder, which nothing in a sandbox sees.

    Raises:
        ConfigError: No harness ran in the attempt.
        SandboxError: The sandbox is gone.
    """
    own = (span for span in reversed(spans) if not span.is_late)
    found = next((span.attributes for span in own if isinstance(span.attributes.get(semconv.WORKSPACE), str)), None)
    if found is None:
        raise ConfigError(
            f'the reward "{reward}" found no workspace, because no coding harness ran; it is for experiments with '
            '[experiment] harness = "NAME"'
        )
    name = str(found.get(semconv.SANDBOX) or "local")
    base = Path(found[semconv.WORKSPACE]).parent if name == "local" else folder / "runs" / "workspaces"
    sandboxes = build_sandboxes(name, base=base, hidden=[folder, *private_folders()])
    sandbox = await sandboxes.attach(found[semconv.WORKSPACE])
    return Attached(sandbox=sandbox, sandboxes=sandboxes, record=found)
