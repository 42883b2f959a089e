"""Labels: names such as ``production`` that point at a version of a resource, and move.

Versions never change, so a roll-out or a roll-back is a label that moves. Every move is kept, under a key of its own
that begins with the time, and the newest one counts: two processes that move a label at once leave two moves and no
torn state, and what a label pointed at before is known.
"""

import re
import time
from collections.abc import Mapping, Sequence

import msgspec

from agl.contracts import Store
from agl.errors import ConfigError, NotFoundError
from agl.schemas import Record, ResourceVersion

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PREFIX = "label/"


class Move(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A label was pointed at a version.

    Attributes:
        name: The resource's name.
        label: Such as ``production``.
        version: What the label points at since.
        moved_at: Unix seconds.
        is_back: Whether this is a roll-back to what the label pointed at before.
        reason: Why, in the words of whoever did it.
    """

    name: str
    label: str
    version: str
    moved_at: float
    is_back: bool = False
    reason: str = ""


async def history(store: Store, name: str, label: str) -> list[Move]:
    """Every move of a label, oldest first."""
    states = await store.load_state(f"{_PREFIX}{name}/{label}/")
    return [msgspec.json.decode(states[key], type=Move) for key in sorted(states)]


async def labels_of(store: Store, name: str) -> dict[str, str]:
    """What every label of a resource points at."""
    prefix = f"{_PREFIX}{name}/"
    states: Mapping[str, bytes] = await store.load_state(prefix)
    newest = {key.removeprefix(prefix).partition("/")[0]: states[key] for key in sorted(states)}
    return {label: msgspec.json.decode(data, type=Move).version for label, data in newest.items()}


async def all_labels(store: Store) -> dict[str, dict[str, str]]:
    """What every label of every resource points at, by resource and label."""
    newest: dict[tuple[str, str], bytes] = {}
    states = await store.load_state(_PREFIX)
    for key in sorted(states):
        name, label, _ = key.removeprefix(_PREFIX).rsplit("/", 2)
        newest[name, label] = states[key]
    found: dict[str, dict[str, str]] = {}
    for (name, label), data in newest.items():
        found.setdefault(name, {})[label] = msgspec.json.decode(data, type=Move).version
    return found


async def labelled(store: Store, name: str, label: str) -> ResourceVersion | None:
    """The version that a label points at, ``None`` if it points at none."""
    moves = await history(store, name, label)
    return await store.resource(name, moves[-1].version) if moves else None


async def move(store: Store, name: str, label: str, version: str, *, reason: str = "") -> Move:
    """Point a label at a version that exists; returns the move, the last one if it points there already.

    Raises:
        ConfigError: The label has characters that it may not have.
        NotFoundError: There is no such version.
    """
    if not NAME.fullmatch(label):
        raise ConfigError(f"the label {label!r} may hold letters, digits, '_', '.' and '-' only")
    await store.resource(name, version)
    moves = await history(store, name, label)
    if moves and moves[-1].version == version:
        return moves[-1]
    return await _record(store, moves, name, label, version, is_back=False, reason=reason)


async def move_back(store: Store, name: str, label: str) -> Move:
    """Point a label at what it pointed at before its present version; again, and it goes further back."""
    moves = await history(store, name, label)
    if not moves:
        raise NotFoundError("label", f"{name}/{label}", f"there are {sorted(await labels_of(store, name)) or 'none'}")
    path: list[str] = []  # what a roll-back leaves again, newest last
    for made in moves:
        if made.is_back:
            path.pop()
        else:
            path.append(made.version)
    if len(path) < 2:
        raise ConfigError(f"the label {label!r} of {name!r} pointed at nothing before {path[-1]!r}; name a version")
    return await _record(store, moves, name, label, path[-2], is_back=True, reason=f"back from {path[-1]}")


async def _record(
    store: Store, moves: Sequence[Move], name: str, label: str, version: str, *, is_back: bool, reason: str
) -> Move:
    last_ns = round(moves[-1].moved_at * 1e9) + 1000 if moves else 0  # the clock may have gone back
    now_ns = max(time.time_ns(), last_ns)
    made = Move(name=name, label=label, version=version, moved_at=now_ns / 1e9, is_back=is_back, reason=reason)
    await store.save_state({f"{_PREFIX}{name}/{label}/{now_ns:020d}": msgspec.json.encode(made)})
    return made
