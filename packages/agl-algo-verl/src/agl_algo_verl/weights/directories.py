"""Directories of a training run that appear whole or not at all, one per step."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill` on a temporary directory beside `target`, flush it to disk and rename it to `target`.

    A `target` that exists is replaced; leftovers of an earlier crash are removed.
    """
    fresh, old = (target.with_name(f".{target.name}.{kind}") for kind in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    fill(fresh)
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def step_directory(parent: Path, step: int) -> Path:
    """Return the directory of a step's files; the names sort as the steps do."""
    return parent / f"{step:06d}"


def prune(parent: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
    """Remove the directories of steps up to `step`, except the newest `keep` and those of `kept`."""
    newest = step_directory(parent, step).name
    found = sorted(path for path in parent.glob("[0-9]*") if path.is_dir() and path.name <= newest)
    for path in found[:-keep]:
        if int(path.name) not in kept:
            shutil.rmtree(path, ignore_errors=True)
