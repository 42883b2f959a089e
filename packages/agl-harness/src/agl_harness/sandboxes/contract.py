"""The contract of sandboxes, in which harnesses run, separated from the machine and from other rollouts.

A sandbox has three folders in its root: ``workspace``, in which the harness works, ``home``, the harness's home folder,
and ``tmp``. A command that fails is a normal result. A sandbox that fails raises :class:`SandboxError`, and the attempt
is repeated.
"""

import asyncio
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol, runtime_checkable

from agl.errors import ConfigError, RunError
from agl.schemas import Record
from agl_run.programs import LostError

WORKSPACE, HOME, TEMPORARY = "workspace", "home", "tmp"
"""The folders in the root of every sandbox."""


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class SandboxError(LostError):
    """The sandbox could not be created, or went away; the harness is not the cause."""


class PathError(RunError):
    """A path leads out of the sandbox; nothing was read or written."""


class Limits(Record, frozen=True, kw_only=True):
    """Limits of a command and all processes that it starts, taken together.

    Attributes:
        seconds: Running time; ``None`` for no limit.
        memory: Bytes of memory in use; 0 for no limit.
        processes: Number of processes; 0 for no limit.
        cpus: Number of CPUs to run on, where a fraction is rounded up; 0 for all CPUs.
    """

    seconds: float | None = None
    memory: int = 0
    processes: int = 0
    cpus: float = 0


NO_LIMITS = Limits()
"""Limits that limit nothing."""


class Finished(Record, frozen=True, kw_only=True):
    """The result of a command that ended.

    Attributes:
        code: The exit status, or the negative number of the signal that ended the command.
        output: The standard output; if it is long, only the start and the end.
        errors: The standard error, shortened in the same way.
        exceeded: The limit that ended the command; ``""`` if none did.
        detail: The exceeded limit and the actual use, for people.
    """

    code: int
    output: str
    errors: str
    exceeded: Literal["", "seconds", "memory", "processes"] = ""
    detail: str = ""


class Sandbox(Protocol):
    """The sandbox of one rollout. Paths are relative to the sandbox's root, such as ``workspace/calc.py``."""

    @property
    def address(self) -> str:
        """Text by which the same backend finds the sandbox again, even from another process."""
        ...

    @property
    def root(self) -> PurePosixPath:
        """The sandbox's root, as programs in the sandbox see it."""
        ...

    async def exec(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: bytes = b"",
        folder: str = WORKSPACE,
        limits: Limits = NO_LIMITS,
    ) -> Finished:
        """Run a command to its end, and then end every process that it started.

        Args:
            words: The program and its arguments.
            environment: All environment variables of the command; the backend adds none.
            stdin: Bytes for the command's standard input.
            folder: The command's working directory.
            limits: The command is stopped when it exceeds one of these limits.

        Raises:
            FileNotFoundError: The program does not exist.
            SandboxError: The sandbox is gone, or cannot start programs.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            FileNotFoundError: The file does not exist, or is a pipe.
            PathError: The path leads out of the sandbox.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and create its parent folders; raises :class:`PathError` for a path out of the sandbox."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or the contents of a folder into the sandbox; links stay links."""
        ...

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or the contents of a folder out of the sandbox; links stay links."""
        ...

    async def close(self) -> None:
        """End all programs in the sandbox, and remove it; idempotent."""
        ...


@runtime_checkable
class CopyableSandbox(Protocol):
    """A sandbox that can be copied."""

    async def snapshot(self) -> Sandbox:
        """Return a new sandbox with a copy of the present workspace; the caller closes it."""
        ...


class Sandboxes(Protocol):
    """A backend, which creates sandboxes and finds them again.

    ``factory(base=..., hidden=..., readable=...)`` builds a backend: ``base`` is the folder for the backend's files on
    this machine, ``hidden`` are folders that programs in a sandbox must not see, and ``readable`` are files and folders
    within hidden ones that they may read.
    """

    async def create(self, name: str) -> Sandbox:
        """Create an empty sandbox; ``name`` must be unique within the backend.

        Raises:
            SandboxError: The sandbox cannot be created at present.
        """
        ...

    async def attach(self, address: str) -> Sandbox:
        """Return the sandbox with the given address; raises :class:`SandboxError` if it is gone."""
        ...


Purpose = Literal["agent", "tests"]
"""The use of a task's sandbox: for the agent, or for tests that run separately from it."""


@runtime_checkable
class TaskSandboxes(Protocol):
    """A backend that creates sandboxes for Harbor tasks, in which programs find folders at absolute paths."""

    has_images: bool
    """True if sandboxes run the task's container image; false if they use the programs of the machine they are on."""

    async def create_for(
        self, name: str, *, task: Path, places: Mapping[str, str], purpose: Purpose = "agent"
    ) -> Sandbox:
        """Create a sandbox for a task; if the backend has no images, the folders at ``places`` are empty.

        Args:
            name: A name that is unique within the backend.
            task: The task's folder.
            places: Absolute paths at which programs find the sandbox's folders and files, by path in the sandbox.
            purpose: ``agent`` if the agent works in the sandbox, ``tests`` if only the tests run in it.

        Raises:
            ConfigError: The sandbox cannot be created on this machine.
            SandboxError: The sandbox cannot be created at present.
        """
        ...


@runtime_checkable
class ManagedSandboxes(Protocol):
    """A backend that must be started and closed, for example because it holds a connection."""

    async def start(self) -> None:
        """Start the backend before the first sandbox; raises :class:`agl.errors.ConfigError` if it cannot work here."""
        ...

    async def close(self) -> None:
        """Close the backend, and the sandboxes that are still open."""
        ...


async def write_by_upload(sandbox: Sandbox, path: str, data: bytes) -> None:
    """Write a file into a sandbox whose backend can only copy existing files."""
    with tempfile.TemporaryDirectory(prefix="agl-write-") as folder:
        source = Path(folder, "file")
        await asyncio.to_thread(source.write_bytes, data)
        await sandbox.upload(source, path)


def checked_path(path: str) -> PurePosixPath:
    """Return a path relative to a sandbox's root; raises :class:`PathError` if it leads out of the sandbox."""
    found = PurePosixPath(path)
    if "\0" in path or found.is_absolute() or ".." in found.parts:
        raise PathError(f"the path {path!r} leads out of the sandbox; write one relative to its root")
    return found


def bytes_of(size: str) -> int:
    """Convert a size such as ``8GB`` to bytes, where 1 GB is 2**30 bytes; 0 for ``""``.

    Raises:
        ConfigError: The text is not a size.
    """
    if not size:
        return 0
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        raise ConfigError(f"memory is {size!r}; write a size such as 512MB or 8GB")
    return int(float(found[1]) * (1 << _POWERS[found[2].upper()]))
