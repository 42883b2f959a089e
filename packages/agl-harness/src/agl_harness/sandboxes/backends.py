"""Builds the backend of sandboxes that an experiment names, and finds an attempt's sandbox for its rewards.

A reward finds the sandbox through attributes of the runner's root span. A harness can add spans to its own attempt with
the attempt's token, and must not be able to name another sandbox. The gateway therefore removes these attributes from
such spans. In addition, only the last span with the attributes that is not late counts: that is the runner's, which is
written when the attempt ends.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
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
from agl_run import import_attribute

GROUP = "agl_sandboxes"
"""The entry-point group under which packages register backends."""


def private_folders() -> list[Path]:
    """Return this user's folders that are hidden from every sandbox: the home folder, and that of agl's signing key."""
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
    """Build the backend with the given name.

    Args:
        name: ``local``, a name in the entry-point group, or ``module:attribute``.
        base: The folder for the backend's files on this machine.
        hidden: Folders that programs in a sandbox must not see.
        readable: Files and folders within hidden ones that such programs may read.
        isolation: How ``local`` separates sandboxes from the machine; other backends take only ``auto``.
        params: Further arguments of the backend.

    Raises:
        ConfigError: The backend does not exist, cannot be imported, or does not accept an argument.
    """
    if name == "local":
        if params:
            raise ConfigError(f'sandbox_params has {sorted(params)}, and sandbox = "local" takes none; remove them')
        return LocalSandboxes(base=base, hidden=hidden, readable=readable, isolation=isolation)
    if isolation != "auto":
        raise ConfigError(f'isolation is for sandbox = "local", and it is {name!r}; remove isolation')
    factory = find_backend(name)
    try:
        built = factory(base=base, hidden=tuple(hidden), readable=tuple(readable), **(params or {}))
    except TypeError as error:
        raise ConfigError(f"the sandbox {name!r} does not take sandbox_params: {error}; correct them") from error
    _check_contract(name, built)
    return built


def find_backend(name: str) -> Callable[..., Any]:
    """Import the factory of a backend; raises :class:`ConfigError` if it does not exist or is of another kind."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    known = ["local", *sorted(found)]
    if name not in known and ":" not in name:
        hint = did_you_mean(name, known, otherwise=f"there are {', '.join(known)}")
        raise ConfigError(f"there is no sandbox {name!r}; {hint}. For one of your own write 'module:attribute'")
    factory = import_attribute(found[name].value if name in found else name, kind="sandbox")
    if inspect.isclass(factory):
        _check_contract(name, factory)
    return factory


def _check_contract(name: str, made: Any) -> None:
    """Refuse a class or a backend that lacks methods of the contract."""
    if not (hasattr(made, "create") and hasattr(made, "attach")):
        home = "agl_harness.sandboxes.contract.Sandboxes"
        raise ConfigError(f"the sandbox {name!r} lacks create or attach, the methods of {home}; add them")


class Attached(Record, frozen=True, kw_only=True):
    """An attempt's sandbox, its backend, and the attributes of the attempt's root span."""

    sandbox: Sandbox
    sandboxes: Sandboxes
    record: Mapping[str, Any]


async def attach(spans: Sequence[Span], *, reward: str, folder: Path) -> Attached:
    """Find the sandbox that an attempt left, for a reward.

    The backend creates new sandboxes in the folder that holds the attempt's sandbox.

    Args:
        spans: The spans of the attempt.
        reward: The reward's name.
        folder: The experiment's folder, which is hidden from sandboxes.

    Raises:
        ConfigError: The attempt did not run a harness.
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
