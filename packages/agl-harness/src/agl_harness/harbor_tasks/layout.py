"""Lays out a sandbox for a Harbor task: the folders that programs find at absolute paths, and the files in them."""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from agl.schemas import Record
from agl_harness.harbor_tasks.dockerfile import Image, ignored_names, is_ignored, sources_of
from agl_harness.harbor_tasks.folder import TaskFolder
from agl_harness.sandboxes.contract import WORKSPACE, Sandbox

LOGS, TESTS, SOLUTION, PLACES = "logs", "tests", "solution", "places"
"""Folders that a sandbox for a task has in addition to those of every sandbox."""

_IGNORE = ".dockerignore"


class Layout(Record, frozen=True, kw_only=True):
    """The folders of a sandbox for a task, and the files that are copied into them.

    Attributes:
        task: The task.
        places: Absolute paths at which programs find the sandbox's folders and files, by path in the sandbox.
        folder: The working directory of programs, as a path in the sandbox.
        uploads: Files and folders to copy into the sandbox, as pairs of source path and path in the sandbox.
        ignored: Patterns from ``.dockerignore`` for files that are left out when a folder is copied.
    """

    task: TaskFolder
    places: dict[str, str]
    folder: str
    uploads: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def inside(self, path: str) -> str | None:
        """Translate an absolute path to a path in the sandbox; ``None`` if it belongs to the machine or the image."""
        wanted = PurePosixPath(path)
        for name, place in sorted(self.places.items(), key=lambda item: -len(PurePosixPath(item[1]).parts)):
            if wanted.is_relative_to(place):
                return str(PurePosixPath(name, wanted.relative_to(place)))
        return None


def layout_of(task: TaskFolder, *, extra: Sequence[str] = ()) -> Layout:
    """Return the layout of an agent's sandbox for a task; ``extra`` adds absolute paths, such as ``/solution``."""
    return _layout(task, task.image, task.folder / "environment", workdir=task.workdir, extra=extra)


def layout_of_tests(task: TaskFolder, *, extra: Sequence[str] = ()) -> Layout:
    """Return the layout of a separate sandbox for a task's tests; ``extra`` adds absolute paths of artifacts."""
    image, folder = task.test_image, task.folder / "tests"
    if image is None:
        image, folder = task.image, task.folder / "environment"
    return _layout(task, image, folder, workdir=image.workdir or task.workdir, extra=extra)


async def fill(sandbox: Sandbox, layout: Layout) -> None:
    """Make a layout's folders in a sandbox, and copy its files into them."""
    with tempfile.TemporaryDirectory(prefix="agl-task-") as empty:
        nothing = Path(empty, "nothing")
        nothing.mkdir()
        for name in (layout.folder, LOGS, TESTS):
            await sandbox.upload(nothing, name)
        for number, (source, path) in enumerate(layout.uploads):
            place = Path(source)
            if layout.ignored and place.is_dir() and not place.is_symlink():
                place = Path(empty, str(number))
                await asyncio.to_thread(_stage, Path(source), place, layout.ignored)
            await sandbox.upload(place, path)


def _layout(task: TaskFolder, image: Image, folder: Path, *, workdir: str, extra: Sequence[str]) -> Layout:
    copies = _copies(image, folder, workdir)
    work = PurePosixPath(workdir)
    above = [path for _, path in copies if path in work.parents and len(path.parts) > 1]
    top = min(above, key=lambda path: len(path.parts), default=work)
    places = {WORKSPACE: str(top), LOGS: "/logs", TESTS: "/tests"}
    layout = Layout(task=task, places=places, folder=str(WORKSPACE / work.relative_to(top)))
    uploads: list[tuple[str, str]] = []
    for source, path in [*copies, *((None, PurePosixPath(path)) for path in extra)]:
        if layout.inside(str(path)) is None:
            is_in_new = source is not None and source.is_file() and not Path(path.parent).exists()
            layout.places[f"{PLACES}/{len(layout.places)}"] = str(path.parent if is_in_new else path)
        if source is not None:
            uploads.append((str(source), layout.inside(str(path)) or ""))
    ignore = folder / _IGNORE
    ignored = ignored_names(ignore.read_text(encoding="utf-8", errors="replace")) if ignore.is_file() else ()
    return msgspec.structs.replace(layout, uploads=tuple(uploads), ignored=ignored)


def _copies(image: Image, folder: Path, workdir: str) -> list[tuple[Path, PurePosixPath]]:
    """Return the files and folders that a Dockerfile copies, each with its absolute path in the image.

    A folder whose target exists on this machine, such as ``/etc``, is split into its files, so that the machine's other
    files in the target stay visible.
    """
    found: list[tuple[Path, PurePosixPath]] = []
    for copying in image.copies:
        target, work = PurePosixPath(copying.target), PurePosixPath(workdir)
        for source in sources_of(copying, folder):
            if source.is_dir() and not source.is_symlink():
                found += _apart(source, target, work)
            else:
                is_folder = copying.is_folder or target == work or target in work.parents
                found.append((source, target / source.name if is_folder else target))
    return found


def _apart(source: Path, target: PurePosixPath, work: PurePosixPath) -> list[tuple[Path, PurePosixPath]]:
    is_machine_s = Path(target).is_dir() and not target.is_relative_to(work)
    if not is_machine_s and target != PurePosixPath("/"):
        return [(source, target)]
    parts: list[tuple[Path, PurePosixPath]] = []
    for child in sorted(source.iterdir()):
        if child.is_dir() and not child.is_symlink():
            parts += _apart(child, target / child.name, work)
        else:
            parts.append((child, target / child.name))
    return parts


def _stage(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Copy a folder without the files that a ``.dockerignore`` leaves out."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        inside = PurePosixPath(folder).relative_to(source)
        return [name for name in names if is_ignored(inside / name, patterns)]

    shutil.copytree(source, target, symlinks=True, ignore=left_out)
