"""Checks Harbor tasks against their sandbox before a run, and reads the tasks of ``train = "harbor:FOLDER"``."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from agl.errors import ConfigError, DatasetError
from agl.schemas import Json
from agl_harness.harbor_tasks.folder import (
    CONFIG,
    PREFIX,
    Lack,
    check_workdir,
    describe,
    instruction_of,
    lacks_of,
    load_task,
)
from agl_harness.sandboxes.isolation import find_isolation
from agl_harness.sandboxes.local import no_places
from agl_harness.settings import HarnessSettings

_BUILT_BY = ("harbor",)
"""The backends that build a task's container image."""


def check_tasks(folders: Sequence[Path], *, settings: HarnessSettings) -> None:
    """Check that tasks can run in the sandbox that an experiment's settings name.

    Raises:
        ConfigError: A task cannot run, or needs something that the sandbox lacks.
    """
    if not folders:
        return
    if settings.sandbox == "local" and not find_isolation(settings.isolation).program:
        raise ConfigError(no_places(find_isolation(settings.isolation).reason))
    lacking: dict[Lack, list[tuple[Path, str]]] = {}
    for folder in dict.fromkeys(folders):
        task = load_task(folder)
        check_workdir(task)
        if settings.sandbox not in _BUILT_BY:
            for lack, line in lacks_of(task, without=settings.without).items():
                lacking.setdefault(lack, []).append((folder, line))
    if lacking:
        raise ConfigError(_lacking(lacking, settings))


def _lacking(lacking: dict[Lack, list[tuple[Path, str]]], settings: HarnessSettings) -> str:
    parts: list[str] = []
    for lack, found in lacking.items():
        folder, line = found[0]
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        parts.append(f"{folder.name}{more}: {describe(lack, line)}")
    names = ", ".join(f'"{lack}"' for lack in (*settings.without, *lacking))
    return (
        f"the sandbox {settings.sandbox!r} has no container images, and Harbor tasks ask for what it does not give: "
        f"{'; '.join(parts)}. Install on this machine what they need and go without with [runner] params = {{ without "
        f'= [{names}] }}, or use sandbox = "harbor", which builds their images'
    )


def read_tasks(name: str, folder: Path) -> list[Json]:
    """Read Harbor tasks, sorted by path.

    Args:
        name: A task folder, a folder of them, or a pattern for them, such as ``tasks/add-*``.
        folder: The folder to which a relative name refers.

    Returns:
        Tasks as objects with ``name`` and ``prompt``; a task within ``folder`` also has ``workspace``.

    Raises:
        DatasetError: No task is found, or a task cannot be read.
    """
    return [_task(path, folder) for path in task_folders(name, folder)]


def task_folders(name: str, folder: Path) -> list[Path]:
    """Return the task folders that a name matches, sorted; the arguments are those of :func:`read_tasks`.

    Raises:
        DatasetError: No task is found.
    """
    found = _folders(name, folder)
    if not found:
        raise DatasetError(
            f"there is no Harbor task in {str(folder / name)!r}; name a folder whose folders have a {CONFIG}, or a "
            'pattern, such as "tasks/add-*"'
        )
    return found


def _folders(name: str, folder: Path) -> list[Path]:
    place = folder / name
    if (place / CONFIG).is_file():
        return [place]
    if place.is_dir():
        return sorted(path.parent for path in place.glob(f"*/{CONFIG}"))
    parts = PurePosixPath(name).parts
    fixed = next((number for number, part in enumerate(parts) if any(sign in part for sign in "*?[")), None)
    if fixed is None:
        return []
    base = folder.joinpath(*parts[:fixed])
    return sorted(path.parent for path in base.glob("/".join((*parts[fixed:], CONFIG))))


def _task(path: Path, folder: Path) -> Json:
    if path.is_symlink():
        raise DatasetError(f"the task {path} is a link; name the folder that it leads to, which sandboxes must not see")
    try:
        load_task(path)
        prompt = instruction_of(path)
    except ConfigError as error:
        raise DatasetError(str(error)) from None
    if not prompt.strip():
        raise DatasetError(f"{path / 'instruction.md'} is empty; write the task there")
    task: dict[str, Json] = {"name": path.name, "prompt": prompt}
    inside = (
        PurePosixPath(path.absolute()).relative_to(folder.absolute())
        if ".." not in path.parts and path.absolute().is_relative_to(folder.absolute())
        else None
    )
    if inside is not None:
        task["workspace"] = f"{PREFIX}{inside}"
    return task
