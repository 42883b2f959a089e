"""Makes a rollout's workspace: a fresh copy of a folder, or of a git tree at a revision, plus the task's files.

In a workspace name such as ``repos/{name}``, ``{name}`` is replaced by that field of the task. The field's value must
not lead out of the folder ``repos``.
"""

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

from agl.errors import ConfigError, RunError
from agl.schemas import Json, Record
from agl_harness.harbor_tasks.folder import PREFIX
from agl_harness.sandboxes.contract import WORKSPACE, Sandbox, SandboxError

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
_GIT = "git:"
_GIT_S = 300.0
_AUTHOR = ("-c", "user.name=agl", "-c", "user.email=agl@localhost", "-c", "commit.gpgsign=false")
_NO_HOOKS = ("-c", "core.hooksPath=/dev/null")
_REPOSITORY = frozenset(
    f"GIT_{name}"
    for name in (
        "DIR",
        "WORK_TREE",
        "INDEX_FILE",
        "OBJECT_DIRECTORY",
        "ALTERNATE_OBJECT_DIRECTORIES",
        "COMMON_DIR",
        "PREFIX",
    )
)
"""Variables that git sets for its hooks; they name a repository and would override the one in the folder."""


class Source(Record, frozen=True, kw_only=True):
    """The folder or git tree that a workspace is copied from.

    Attributes:
        folder: The folder.
        revision: Revision of the git tree in the folder; ``""`` to copy the folder as it is.
        is_task: True if the folder is a Harbor task, which describes how to make the workspace.
    """

    folder: str
    revision: str = ""
    is_task: bool = False


def filled(template: str, task: Json) -> str:
    """Replace the fields in a name, such as ``{name}``, with values from a task.

    Raises:
        ConfigError: The task lacks a field, or a field's value leads out of the folder before it.
    """
    fields = fields_of(task)

    def value(match: re.Match[str]) -> str:
        found = fields.get(match[1])
        if not isinstance(found, str | int) or isinstance(found, bool):
            has = ", ".join(sorted(fields)) or "no fields"
            raise ConfigError(
                f"{template!r} needs the field {match[1]!r} of the task, which has {has}; give every task a text of "
                "that name"
            )
        text = str(found)
        if "\0" in text or PurePosixPath(text).is_absolute() or ".." in PurePosixPath(text).parts:
            raise ConfigError(
                f"the field {match[1]!r} of the task is {text[:80]!r}, which leads out of the folder of {template!r}; "
                "take the '/' at its beginning, and '..', out of it"
            )
        return text

    return _FIELD.sub(value, template)


def fields_of(task: Json) -> dict[str, Any]:
    """Return the fields of a task; empty for a task that is not an object."""
    return cast("dict[str, Any]", task) if isinstance(task, dict) else {}


def source_of(template: str, task: Json, *, folder: Path) -> Source | None:
    """Return the source of a task's workspace; ``None`` for an empty workspace.

    Args:
        template: The experiment's ``workspace``, which may have fields.
        task: The task; its own ``workspace``, if it has one, takes precedence.
        folder: The folder to which relative paths refer.

    Raises:
        ConfigError: The folder does not exist, or the revision after ``@`` is empty or invalid.
    """
    name = _name(template, task)
    if not name:
        return None
    if name.startswith(PREFIX):
        return Source(folder=str(_folder(folder / name.removeprefix(PREFIX)).resolve()), is_task=True)
    path, _, revision = name.removeprefix(_GIT).rpartition("@") if name.startswith(_GIT) else (name, "", "")
    if name.startswith(_GIT) and not path:
        path, revision = name.removeprefix(_GIT), "HEAD"
    if name.startswith(_GIT) and not revision:
        raise ConfigError(f"the workspace {name!r} names no revision after its '@'; write one, such as @HEAD")
    if revision.startswith("-"):
        raise ConfigError(f"the revision {revision!r} begins with '-'; name a commit, a tag or a branch")
    return Source(folder=str(_folder(folder / path).resolve()), revision=revision)


def task_folder_of(template: str, task: Json, *, folder: Path) -> Path | None:
    """Return the folder of a Harbor task; ``None`` for other tasks; see :func:`source_of`."""
    source = source_of(template, task, folder=folder)
    return Path(source.folder) if source is not None and source.is_task else None


def _name(template: str, task: Json) -> str:
    """Return the task's own ``workspace``, which must stay within the experiment's folder, or the filled template."""
    own = fields_of(task).get("workspace")
    if not isinstance(own, str) or not own:
        return filled(template, task) if template else ""
    kind = next((kind for kind in (_GIT, PREFIX) if own.startswith(kind)), "")
    return kind + filled("{workspace}", {"workspace": own.removeprefix(kind)})


def _folder(place: Path) -> Path:
    if not place.is_dir():
        raise ConfigError(f"the workspace {str(place)!r} is not a folder; name one relative to the experiment file")
    return place


def check_apart(source: Source | None, *, base: Path) -> None:
    """Raise :class:`ConfigError` if the folder to copy contains ``base``, the folder of the copies."""
    if source is not None and not source.revision and not source.is_task and base.is_relative_to(source.folder):
        raise ConfigError(
            f"the workspace {source.folder!r} holds {str(base)!r}, in which sandboxes are made, so that its copy would "
            "hold itself; name a folder within it, or git:FOLDER@REVISION for what is committed there"
        )


async def fill_workspace(sandbox: Sandbox, source: Source | None, files: Mapping[str, str]) -> None:
    """Copy a workspace into a sandbox, and write the task's own files over it.

    Raises:
        ConfigError: The revision does not exist.
        PathError: A file of the task leads out of the workspace.
    """
    if source is not None and source.revision:
        with tempfile.TemporaryDirectory(prefix="agl-workspace-") as folder:
            await asyncio.to_thread(_check_out, source, Path(folder))
            await sandbox.upload(Path(folder), WORKSPACE)
    elif source is not None:
        await sandbox.upload(Path(source.folder), WORKSPACE)
    for path, text in files.items():
        checked_file(path)
        await sandbox.write(f"{WORKSPACE}/{path}", text.encode())


def checked_file(path: str) -> str:
    """Return the path of a file in the workspace; raises :class:`ConfigError` if it leads out of the workspace."""
    found = PurePosixPath(path)
    if not path or "\0" in path or found.is_absolute() or ".." in found.parts:
        raise ConfigError(f"the file {path!r} leads out of the workspace; write a path relative to it")
    return path


def files_of(task: Json, *, key: str = "files") -> dict[str, str]:
    """Return the files in a task's field ``key``, as texts by path; empty if the task lacks the field.

    Raises:
        ConfigError: The field is not an object of texts.
    """
    found: Any = fields_of(task).get(key, {})
    texts = cast("dict[str, Any]", found) if isinstance(found, dict) else dict[str, Any]()
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ConfigError(f'{key} of a task holds texts by path, such as {{"calc.py": "..."}}; correct the task')
    return texts


def _check_out(source: Source, target: Path) -> None:
    """Write the files of a revision as a new repository with one commit, so that the agent sees no later commits."""
    git = shutil.which("git")
    if git is None:
        raise ConfigError(f"the workspace is a git tree of {source.folder!r}, and git is not installed; install git")
    with tempfile.TemporaryDirectory(prefix="agl-index-") as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        inside = _git(git, "rev-parse", "--show-prefix", folder=source.folder)
        prefix = inside.stdout.decode(errors="surrogateescape").strip("\n")
        tree = f"{source.revision}:{prefix}" if prefix else source.revision
        read = _git(git, "read-tree", tree, folder=source.folder, variables=index)
        if read.returncode != 0:
            said = (inside.stderr or read.stderr).decode(errors="replace").strip()[:300]
            raise ConfigError(
                f"the revision {source.revision!r} of {source.folder!r} cannot be read: {said}; name a commit, a tag "
                "or a branch of that repository"
            )
        written = _git(git, f"--work-tree={target}", "checkout-index", "--all", folder=source.folder, variables=index)
        if written.returncode != 0:
            said = written.stderr.decode(errors="replace").strip()[:300]
            raise SandboxError(f"the git tree of {source.folder!r} cannot be written: {said}")
    for words in (
        ["init", "--quiet", "--template="],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "--allow-empty", "-m", "Start"],
    ):
        made = _git(git, *_AUTHOR, *words, folder=str(target))
        if made.returncode != 0:
            raise RunError(f"git {words[0]} failed: {made.stderr.decode(errors='replace').strip()[:300]}")


def _git(
    git: str, *words: str, folder: str, variables: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run git in a folder, without hooks."""
    passed = {name: value for name, value in os.environ.items() if name not in _REPOSITORY}
    return subprocess.run(
        [git, *_NO_HOOKS, *words],
        cwd=folder,
        env={**passed, **(variables or {})},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=_GIT_S,
        check=False,
    )
