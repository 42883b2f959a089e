"""Labels: names such as ``production`` that point at a version of a resource, and move.

Versions never change: promotion and rollback move a label. The store keeps every move.
"""

import re
from collections.abc import Iterable

from agl.contracts import LabelMove, Store
from agl.errors import ConfigError, NotFoundError
from agl.hints import did_you_mean
from agl.schemas import ResourceVersion

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


async def labels_of(store: Store, name: str) -> dict[str, str]:
    """Return the version that each label of a resource points at."""
    return {move.label: move.version for move in await store.labels(name)}


async def labelled(store: Store, name: str, label: str) -> ResourceVersion | None:
    """Return the version that a label points at, ``None`` if there is none."""
    version = (await labels_of(store, name)).get(label)
    return None if version is None else await store.resource(name, version)


async def move(store: Store, name: str, label: str, version: str, *, reason: str = "") -> LabelMove:
    """Point a label at an existing version; returns the move, or the last one if the label already points there.

    Raises:
        ConfigError: The label has characters that it may not have.
        NotFoundError: There is no such version.
    """
    if not LABEL.fullmatch(label):
        raise ConfigError(f"the label {label!r} may hold letters, digits, '_', '.' and '-' only")
    return await store.move_label(LabelMove(name=name, label=label, version=version, reason=reason))


async def move_back(store: Store, name: str, label: str) -> LabelMove:
    """Point a label at its previous version; each further call goes one version back."""
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
    """Return the versions that roll-backs lead through, the present one last; ``moves`` are a label's, oldest first.

    A move that is called a roll-back and leads elsewhere, as other programs may write it, counts as a step forward.
    """
    path: list[str] = []
    for made in moves:
        if made.is_back and path[-2:-1] == [made.version]:
            path.pop()
        else:
            path.append(made.version)
    return path
