"""Finds the sandbox of an attempt by its record, for rewards.

A harness may add spans to its own attempt, with the attempt's token. A gateway removes from these what only a runner
records, and the runner's span comes after them, because it is written when the attempt ends.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agl import semconv
from agl.errors import ConfigError
from agl.schemas import Span
from agl_harness.backends import build_sandboxes, private_folders
from agl_harness.isolation import Kind
from agl_harness.sandbox import Sandboxes


def record_of(spans: Sequence[Span], *, reward: str) -> Mapping[str, Any]:
    """Return the attributes that the runner gave an attempt; raises :class:`ConfigError` if no harness ran in it."""
    for span in reversed(spans):
        if not span.is_late and isinstance(span.attributes.get(semconv.WORKSPACE), str):
            return span.attributes
    raise ConfigError(
        f'the reward "{reward}" found no workspace, because no coding harness ran; it is for experiments with '
        '[experiment] harness = "NAME"'
    )


def check_named(named: str, *, folder: Path, isolation: Kind, params: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for a backend of sandboxes that a reward names and that cannot be built."""
    if named:
        build_sandboxes(named, base=folder, hidden=[], isolation=isolation, params=params)


def sandboxes_of(
    record: Mapping[str, Any], *, named: str, folder: Path, isolation: Kind, params: Mapping[str, Any]
) -> Sandboxes:
    """Return the backend of an attempt's sandbox, which keeps its own sandboxes beside that one.

    Args:
        record: The attempt's attributes.
        named: The backend's name, where a reward has a setting for it.
        folder: The experiment's folder, which nothing in a sandbox sees.
        isolation: For ``local``.
        params: Further arguments of the backend.
    """
    name = named or str(record.get(semconv.SANDBOX) or "local")
    beside = Path(record[semconv.WORKSPACE]).parent
    return build_sandboxes(
        name,
        base=beside if name == "local" else folder / "runs" / "workspaces",
        hidden=[folder, *private_folders()],
        isolation=isolation,
        params=params,
    )
