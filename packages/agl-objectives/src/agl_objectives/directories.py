"""Directories of a training run that appear whole or not at all, one per step."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

__all__ = ["prune", "step_directory", "write_directory"]


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill` on an empty temporary directory next to `target`, flush it to disk and rename it to `target`.

    A `target` that exists is replaced. A crash at any point leaves the old one, the new one, or none, but never a
    mixture. Leftovers of an earlier crash are removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (target.with_name(f".{target.name}.{kind}") for kind in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    fill(fresh)
    # Contents before names: after a power cut, a renamed directory must not hold empty files.
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            _flush(path)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    _flush_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def step_directory(parent: Path, step: int) -> Path:
    """Return the directory of a step's files; names sort in the order of the steps."""
    return parent / f"{step:06d}"


def prune(parent: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
    """Remove the directories of steps up to `step`, except the newest `keep` and those of the steps in `kept`."""
    newest = step_directory(parent, step).name
    found = sorted(path for path in parent.glob("[0-9]*") if path.is_dir() and path.name <= newest)
    staying = {step_directory(parent, each).name for each in kept}
    for path in found[:-keep]:
        if path.name not in staying:
            shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    if os.name != "posix":  # other systems cannot open a directory to flush it
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
