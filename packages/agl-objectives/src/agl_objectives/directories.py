"""Directories of a training run that appear whole or not at all, one per step, with checksums of their files."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from typing import TYPE_CHECKING

from agl.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

__all__ = ["damage", "prune", "require_safetensors", "step_directory", "write_directory"]

_CHECKSUMS = "checksums.sha256"
"""File with the SHA-256 of the other files of a directory, in the format of `sha256sum`."""

_CARD = "README.md"
"""The model card, which people and `agl data export` rewrite."""

_FULL = (errno.ENOSPC, errno.EDQUOT)  # of the disk, of the user's quota


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill` on an empty temporary directory next to `target`, flush it to disk and rename it to `target`.

    A `target` that exists is replaced. A crash at any point leaves the old one, the new one, or none, but never a
    mixture. Leftovers of an earlier crash are removed. The directory also gets checksums, which `damage` compares.
    Raises RunError if the disk or a quota is full; what was written is then removed, and an old `target` stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (target.with_name(f".{target.name}.{kind}") for kind in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    try:
        _fill(fresh, fill)
    except Exception as error:
        shutil.rmtree(fresh, ignore_errors=True)
        # safetensors raises an error of its own, which names the number in its text.
        if not any(getattr(error, "errno", None) == full or f"os error {full}" in str(error) for full in _FULL):
            raise
        free = shutil.disk_usage(target.parent).free
        raise RunError(
            f"The disk or a quota is full: {target} was not written, with {free / 1e6:.1f} MB free on the disk. "
            "States saved before are whole. Make room, then continue with --resume."
        ) from error
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    _flush_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _fill(directory: Path, fill: Callable[[Path], None]) -> None:
    fill(directory)
    (directory / _CHECKSUMS).unlink(missing_ok=True)  # perhaps a hard link to the checksums of another directory
    (directory / _CHECKSUMS).write_text(_checksums(directory), encoding="utf-8")
    # Contents before names: after a power cut, a renamed directory must not hold empty files.
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            _flush(path)


def damage(directory: Path, *, state: str = _CHECKSUMS, suffix: str = "") -> str:
    """Return which file of a directory of `write_directory` is missing or was changed, `""` for none.

    Files that were added later do not matter. If there are no checksums, only the file named `state`, if any, is
    checked: it must not be empty.

    Args:
        suffix: The end of the names of the files to check.
    """
    if not directory.is_dir():
        return f"{directory} does not exist"
    has_checksums = (directory / _CHECKSUMS).exists()
    if not (has_checksums or state):
        return ""
    path = directory / (_CHECKSUMS if has_checksums else state)
    try:
        expected = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if not expected:
        return f"{path} is empty"
    if not has_checksums:
        return ""
    odd = sorted(set(expected.splitlines()) - set(_checksums(directory).splitlines()))
    odd = [line for line in odd if line.endswith(suffix)]
    return f"{directory / odd[0].partition('  ')[2]} is missing or was changed" if odd else ""


def _checksums(directory: Path) -> str:
    """Return a line for each file below `directory` except the model card and the checksums themselves."""
    lines: list[str] = []
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path not in (directory / _CHECKSUMS, directory / _CARD):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{found}  {path.relative_to(directory).as_posix()}\n")
    return "".join(lines)


def require_safetensors(adapter: str) -> None:
    """Raise ConfigError for an adapter without `adapter_model.safetensors`, in whose place peft would read a pickle."""
    if not os.path.isfile(os.path.join(adapter, "adapter_model.safetensors")):
        raise ConfigError(
            f"The LoRA adapter {adapter} has no adapter_model.safetensors. Save it with safetensors; pickled weights "
            "(adapter_model.bin) are not read."
        )


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
