"""Reads and moves labels: names such as ``production`` that point at a version of a resource.

Versions never change; promotion and rollback only move a label. The store records every move.
"""

import re
from collections.abc import Iterable

from agl.contracts import LabelMove, Store
from agl.errors import ConfigError, NotFoundError
from agl.hints import did_you_mean
from agl.schemas import ResourceVersion

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


async def labels_of(store: Store, name: str) -> dict[str, str]:
    """Map each label of a resource to the version at which it points."""
    return {move.label: move.version for move in await store.labels(name)}


async def labelled(store: Store, name: str, label: str) -> ResourceVersion | None:
    """Return the version at which a label points; ``None`` if the label does not exist."""
    version = (await labels_of(store, name)).get(label)
    return None if version is None else await store.resource(name, version)


async def move(store: Store, name: str, label: str, version: str, *, reason: str = "") -> LabelMove:
    """Point a label at an existing version; returns the move, or the label's last move if it already points there.

    Raises:
        ConfigError: The label has other characters than letters, digits, ``_``, ``.`` and ``-``.
        NotFoundError: The resource has no such version.
    """
    if not LABEL.fullmatch(label):
        raise ConfigError(f"the label {label!r} may hold letters, digits, '_', '.' and '-' only")
    return await store.move_label(LabelMove(name=name, label=label, version=version, reason=reason))


async def move_back(store: Store, name: str, label: str) -> LabelMove:
    """Point a label at its previous version; each further call goes one version further back."""
    moves = await store.label_moves(name, label)
    if not moves:
        there = sorted(await labels_of(store, name))
        raise NotFoundError(
            "label", f"{name}/{label}", did_you_mean(label, there, otherwise=f"there are {there or 'none'}")
        )
    path = label_path(moves)
    if len(path) < 2:
        raise ConfigError(f"the label {label!r} of {name!r} pointed at nothing before {path[-1]!r}; name a version")
    back = LabelMove(name=name, label=label, version=path[-2], is_back=True, reason=f"back from {path[-1]}")
    return await store.move_label(back)


def label_path(moves: Iterable[LabelMove]) -> list[str]:
    """Return the versions to which repeated rollbacks lead, oldest first; the last one is the current version.

    ``moves`` are all moves of one label, oldest first. A move that is marked as a rollback but does not lead to the
    previous version, which only other programs write, counts as a move forward.
    """
    path: list[str] = []
    for made in moves:
        if made.is_back and path[-2:-1] == [made.version]:
            path.pop()
        else:
            path.append(made.version)
    return path
