"""The contract of sandboxes: where a harness runs, apart from the machine and from other rollouts.

A sandbox has three folders below its root: ``workspace``, in which the harness works, ``home``, its home folder, and
``tmp``. A command that fails is an answer; a sandbox that fails raises :class:`SandboxError`, and the attempt is
repeated.
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
"""The folders of a sandbox."""


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class SandboxError(LostError):
    """The sandbox could not be made, or went away; nothing that the harness did is the cause."""


class PathError(RunError):
    """A path leads out of the sandbox; nothing was read or written."""


class Limits(Record, frozen=True, kw_only=True):
    """Limits of all that a command starts, taken together.

    Attributes:
        seconds: Time; ``None`` for no limit.
        memory: Bytes of memory in use; 0 for no limit.
        processes: Number of processes; 0 for no limit.
        cpus: Number of CPUs that it runs on, of which part of one counts as one; 0 for all.
    """

    seconds: float | None = None
    memory: int = 0
    processes: int = 0
    cpus: float = 0


NO_LIMITS = Limits()
"""No limits."""


class Finished(Record, frozen=True, kw_only=True):
    """A command that ended.

    Attributes:
        code: Its exit status, or minus the number of the signal that ended it.
        output: Its standard output; of a long one the beginning and the end.
        errors: Its standard error, cut in the same way.
        exceeded: The limit that ended it, ``""`` if none did.
        detail: The limit and the use of it, for people.
    """

    code: int
    output: str
    errors: str
    exceeded: Literal["", "seconds", "memory", "processes"] = ""
    detail: str = ""


class Sandbox(Protocol):
    """A place for one rollout: ``async`` methods, paths relative to its root, such as ``workspace/calc.py``."""

    @property
    def address(self) -> str:
        """Text by which the same backend finds it again, also from another process."""
        ...

    @property
    def root(self) -> PurePosixPath:
        """Its root as programs within it see it."""
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
        """Run a command to its end, which is that of everything it started.

        Args:
            words: The program and its arguments.
            environment: Its whole environment; the backend adds nothing to it.
            stdin: Bytes for its standard input.
            folder: Its working directory.
            limits: Limits, beyond which it is stopped.

        Raises:
            FileNotFoundError: There is no such program.
            SandboxError: The sandbox is gone, or cannot start programs.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Return a file's content; raises :class:`FileNotFoundError`, and :class:`PathError` for a path outside."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file and the folders above it; raises :class:`PathError` for a path outside."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or the contents of a folder into the sandbox; links stay links."""
        ...

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or the contents of a folder out of the sandbox; links stay links."""
        ...

    async def close(self) -> None:
        """End its programs, and remove it; idempotent."""
        ...


@runtime_checkable
class CopyableSandbox(Protocol):
    """A sandbox that can be copied."""

    async def snapshot(self) -> Sandbox:
        """Return a sandbox of its own with the same workspace as it is now; who calls this closes it."""
        ...


class Sandboxes(Protocol):
    """A backend: makes sandboxes and finds them again.

    ``factory(base=..., hidden=..., readable=...)`` builds one: ``base`` is the folder for its files on this
    machine, ``hidden`` the folders that nothing in a sandbox may see, ``readable`` the exceptions within them.
    """

    async def create(self, name: str) -> Sandbox:
        """Make an empty sandbox; ``name`` is unique within the backend.

        Raises:
            SandboxError: It cannot be made now.
        """
        ...

    async def attach(self, address: str) -> Sandbox:
        """Return the sandbox of an address; raises :class:`SandboxError` if it is gone."""
        ...


Purpose = Literal["agent", "tests"]
"""The use of a sandbox for a task: for the agent, or for tests that run apart from it."""


@runtime_checkable
class TaskSandboxes(Protocol):
    """A backend that makes sandboxes for Harbor tasks, whose programs find folders at absolute paths."""

    has_images: bool
    """True if it builds the task's image, with the image's own programs; else it is of the machine that it runs on."""

    async def create_for(
        self, name: str, *, task: Path, places: Mapping[str, str], purpose: Purpose = "agent"
    ) -> Sandbox:
        """Make a sandbox for a task; without images its places are empty.

        Args:
            name: Unique within the backend.
            task: The task's folder.
            places: Absolute paths at which programs find the sandbox's folders and files, by their path in it.
            purpose: Whether the agent works in it, or only the tests.

        Raises:
            ConfigError: It cannot be made on this machine.
            SandboxError: It cannot be made now.
        """
        ...


@runtime_checkable
class ManagedSandboxes(Protocol):
    """A backend with something of its own to start and to end, such as a connection."""

    async def start(self) -> None:
        """Start it before the first sandbox; raises :class:`agl.errors.ConfigError` if it cannot work here."""
        ...

    async def close(self) -> None:
        """End it, and the sandboxes that are left."""
        ...


async def write_by_upload(sandbox: Sandbox, path: str, data: bytes) -> None:
    """Write a file into a sandbox whose backend copies files only."""
    with tempfile.TemporaryDirectory(prefix="agl-write-") as folder:
        source = Path(folder, "file")
        await asyncio.to_thread(source.write_bytes, data)
        await sandbox.upload(source, path)


def checked_path(path: str) -> PurePosixPath:
    """Return a path relative to a sandbox's root; raises :class:`PathError` if it leads out of there."""
    found = PurePosixPath(path)
    if "\0" in path or found.is_absolute() or ".." in found.parts:
        raise PathError(f"the path {path!r} leads out of the sandbox; write one relative to its root")
    return found


def bytes_of(size: str) -> int:
    """Return the bytes of a size such as ``8GB`` (1 GB is 2**30 bytes); 0 for ``""``.

    Raises:
        ConfigError: The text is not a size.
    """
    if not size:
        return 0
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        raise ConfigError(f"memory is {size!r}; write a size such as 512MB or 8GB")
    return int(float(found[1]) * (1 << _POWERS[found[2].upper()]))
