"""Marks resource versions that are saved later or never, and tells which of them were saved in the end."""

from collections.abc import Iterable
from typing import Any

from agl.contracts import Store
from agl.schemas import Json, ResourceVersion
from agl_inspect.records.state import run_key

DEFERRED = "deferred"
"""Metadata of a version that is saved later or never; the value names its experiment and run."""


def deferred(experiment: str, run: int) -> dict[str, Json]:
    """Return the metadata of a version that is saved later or never."""
    return {DEFERRED: {"experiment": experiment, "run": run}}


def saved_marks(experiment: str, run: int, versions: Iterable[ResourceVersion]) -> dict[str, bytes]:
    """Return what remembers that these versions are saved, by key."""
    return {_mark(experiment, run, each.name, each.version): b"1" for each in versions if DEFERRED in each.metadata}


async def unsaved(store: Store, versions: Iterable[ResourceVersion]) -> set[tuple[str, str]]:
    """Return those of the versions that were never saved, by name and version."""
    found = [each for each in versions if DEFERRED in each.metadata]
    folders = {_mark(*_place(each), each.name, "") for each in found}
    marks = {key for folder in folders for key in await store.load_state(folder)}
    return {(each.name, each.version) for each in found if _mark(*_place(each), each.name, each.version) not in marks}


def _place(version: ResourceVersion) -> tuple[str, int]:
    place: Any = version.metadata[DEFERRED]
    return str(place["experiment"]), int(place["run"])


def _mark(experiment: str, run: int, name: str, version: str) -> str:
    return run_key(experiment, run, f"saved/{name}/{version}")
