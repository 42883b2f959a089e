"""Sandboxes on this machine: each has a folder, and its processes are isolated if bubblewrap works.

Next to a sandbox's folder is a lock file, whose lock the owner process holds. If the owner was killed, the lock is
free, and the next process removes the sandbox. A folder without a lock file was kept for people to look at.
"""

import asyncio
import logging
import math
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

from agl.errors import ConfigError, RunError
from agl.hints import pip_install
from agl.schemas import new_span_id
from agl_harness.sandboxes.contract import (
    HOME,
    NO_LIMITS,
    TEMPORARY,
    WORKSPACE,
    Finished,
    Limits,
    PathError,
    Purpose,
    Sandbox,
    SandboxError,
    checked_path,
)
from agl_harness.sandboxes.isolation import Isolation, Kind, View, find_isolation
from agl_harness.sandboxes.usage import exact_memory, file_memory, usage_below
from agl_run.programs import BoundProcess, PrintedText

_LOG = logging.getLogger("agl_harness")

T = TypeVar("T")

_LOCK = ".lock"
_LOOK_S = 0.25
"""Seconds between two checks of a command's use of memory and processes."""

_THREADS = 16
"""Number of threads per process for which the system's own limit, only a backstop, leaves room."""

_PLACES = "places.json"


def no_places(reason: str) -> str:
    """Return the error message for a task that needs absolute paths where bubblewrap does not work."""
    return (
        "a Harbor task names absolute paths, such as /app and /tests, and this machine cannot make them, because "
        f"{reason}; run: {pip_install('agl-harness[sandbox]')}, allow user namespaces, or use another sandbox"
    )


class LocalSandboxes:
    """Creates sandboxes in folders of this machine.

    Args:
        base: The folder in which the sandboxes' folders are created.
        hidden: Folders that programs in a sandbox do not see, besides other sandboxes; needs bubblewrap.
        readable: Files and folders within hidden ones that programs in a sandbox may read.
        isolation: ``bwrap``, ``none`` for plain processes, or ``auto`` for bubblewrap if it works.
    """

    has_images = False

    def __init__(
        self, *, base: Path, hidden: Sequence[Path] = (), readable: Sequence[Path] = (), isolation: Kind = "auto"
    ) -> None:
        self._base = base.resolve()
        self._view = View.of([*hidden, self._base], readable)
        self._kind: Kind = isolation
        self._isolation: Isolation | None = None

    @property
    def isolation(self) -> Isolation:
        """The isolation of commands, determined at first use; logs a warning if ``auto`` finds no bubblewrap."""
        if self._isolation is None:
            self._isolation = find_isolation(self._kind)
            if self._isolation.warning and self._kind != "none":
                _LOG.warning("%s", self._isolation.warning)
        return self._isolation

    async def create(self, name: str) -> "LocalSandbox":
        """Create an empty sandbox; raises :class:`SandboxError` if its folder cannot be made."""
        isolation = await asyncio.to_thread(lambda: self.isolation)
        root = self._base / checked_path(name)
        try:
            lock = await asyncio.to_thread(_make, root)
        except OSError as error:
            raise SandboxError(f"the sandbox {root} cannot be made: {error}") from error
        return LocalSandbox(root, isolation=isolation, view=self._view, lock=lock)

    async def create_for(
        self, name: str, *, task: Path, places: Mapping[str, str], purpose: Purpose = "agent"
    ) -> "LocalSandbox":
        """Create an empty sandbox for a task, in which the task's own folder is hidden.

        Raises:
            ConfigError: Bubblewrap does not work on this machine.
        """
        isolation = await asyncio.to_thread(lambda: self.isolation)
        if not isolation.program:
            raise ConfigError(no_places(isolation.reason))
        sandbox = await self.create(name)
        return await sandbox.placed(places, hidden=(task.resolve(),))

    async def attach(self, address: str) -> "LocalSandbox":
        """Return the sandbox whose folder is at ``address``; raises :class:`SandboxError` if it is gone."""
        isolation = await asyncio.to_thread(lambda: self.isolation)
        root = Path(address).resolve()
        if not (root / WORKSPACE).is_dir():
            raise SandboxError(f"the sandbox {address} is gone")
        sandbox = LocalSandbox(root, isolation=isolation, view=self._view, lock=None).with_places()
        if sandbox.has_places and not isolation.program:
            raise ConfigError(no_places(isolation.reason))
        return sandbox

    def remove_abandoned(self) -> None:
        """Remove the sandboxes whose owner processes were killed."""
        for file in self._base.glob(f"*{_LOCK}"):
            with suppress(OSError, Timeout), _lock_of(file):
                _remove(file.with_name(file.name.removesuffix(_LOCK)))
                file.unlink(missing_ok=True)

    def prune(self, most: int) -> None:
        """Remove the oldest folders of sandboxes that were kept, so that at most ``most`` are left."""
        kept = self.kept()
        for root in kept[: max(0, len(kept) - most)]:
            _remove(root)

    def kept(self) -> list[Path]:
        """Return the folders of sandboxes that were kept, oldest first."""
        if not self._base.is_dir():
            return []
        found = [path for path in self._base.iterdir() if path.is_dir() and not _lock_file(path).exists()]
        return sorted(found, key=lambda path: path.stat().st_mtime)


class LocalSandbox:
    """A sandbox in a folder; see :class:`agl_harness.Sandbox`."""

    def __init__(self, root: Path, *, isolation: Isolation, view: View, lock: FileLock | None) -> None:
        self._root = root
        self._places: dict[str, str] = {}
        self._hidden: tuple[Path, ...] = ()
        self._isolation = isolation
        self._view = view
        self._lock = lock
        self._running: set[BoundProcess] = set()

    @property
    def address(self) -> str:
        """The path of the sandbox's folder."""
        return str(self._root)

    @property
    def root(self) -> PurePosixPath:
        """The sandbox's folder, which programs in the sandbox see at the same path."""
        return PurePosixPath(self._root)

    @property
    def has_places(self) -> bool:
        """True if programs find the sandbox's folders at further absolute paths, which needs bubblewrap."""
        return bool(self._places)

    async def exec(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: bytes = b"",
        folder: str = WORKSPACE,
        limits: Limits = NO_LIMITS,
    ) -> Finished:
        """Run a command to its end, and then end every process that it started."""
        place = self._place(folder)
        if not place.is_dir():
            raise SandboxError(f"the sandbox {self._root} is gone")
        program = shutil.which(words[0], path=environment.get("PATH", os.defpath))
        if program is None and not (place / words[0]).is_file():
            raise FileNotFoundError(f"there is no program {words[0]!r}")
        mark = self._root / f".{new_span_id()}"
        command = self._isolation.wrap(
            [*_on_cpus(limits.cpus), program or words[0], *words[1:]],
            folder=Path(self._seen(folder)),
            writable=[self._root / name for name in (WORKSPACE, HOME, TEMPORARY)],
            places={path: found for name, path in self._places.items() if (found := self._place(name)).exists()},
            hidden=(*self._view.hidden, *self._hidden),
            readable=self._view.programs(environment.get("PATH", "")),
            mark=mark,
            limits=_system_limits(limits, is_apart=bool(self._isolation.program)),
        )
        try:
            finished = await self._run(command, environment, place, stdin, limits)
            if self._isolation.program and not finished.exceeded and not (mark.exists() and mark.stat().st_size):
                raise SandboxError(f"bubblewrap could not start {words[0]!r}: {finished.errors.strip()[:500]}")
        finally:
            mark.unlink(missing_ok=True)
        return finished

    async def _run(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, stdin: bytes, limits: Limits
    ) -> Finished:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        try:
            kept = await BoundProcess.start(command, environment=environment, cwd=folder, **pipes)
        except OSError as error:
            raise SandboxError(f"the sandbox {self._root} cannot start programs: {error}") from error
        self._running.add(kept)
        try:
            in_memory = (Path("/tmp"), *self._view.hidden) if self._isolation.program else ()
            return await _watch(kept, stdin, limits, in_memory)
        finally:
            await kept.stop()
            self._running.discard(kept)

    async def read(self, path: str) -> bytes:
        """Return a file's content."""
        return await asyncio.to_thread(self._content(path).read_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and create its parent folders."""
        await self._disk(_write, self._inside(path), data)

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or the contents of a folder into the sandbox."""
        await self._disk(copy_files, source, self._inside(path))

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or the contents of a folder out of the sandbox."""
        source = self._content(path)
        await asyncio.to_thread(_make_readable, source)
        await self._disk(copy_files, source, target)

    async def snapshot(self) -> Sandbox:
        """Return a new sandbox with a copy of the workspace, in a folder next to this sandbox's folder."""
        root = self._root.with_name(f"{self._root.name}-{new_span_id()}")
        lock = await self._disk(_make, root)
        copy = LocalSandbox(root, isolation=self._isolation, view=self._view, lock=lock)
        copied = [WORKSPACE, *([HOME, *self._places, _PLACES] if self._places else ())]
        try:
            await asyncio.to_thread(_make_readable, self._root)
            for name in dict.fromkeys(copied):
                if (self._root / name).exists():
                    await copy.upload(self._root / name, name)
            copy.with_places()
        except BaseException:
            await copy.close()
            raise
        return copy

    async def close(self) -> None:
        """End all programs in the sandbox, and remove its folder."""
        await self._end()
        await asyncio.to_thread(_remove, self._root)
        self._give_up_lock()

    async def keep(self) -> None:
        """End all programs in the sandbox, and leave its folder for people to look at."""
        await self._end()
        await asyncio.to_thread(_remove, self._root / TEMPORARY)
        self._give_up_lock()

    async def placed(self, places: Mapping[str, str], *, hidden: Sequence[Path]) -> "LocalSandbox":
        """Let programs find folders at absolute paths too, and hide folders from them.

        Both are stored in a file of the sandbox that its programs cannot reach.
        """
        given = msgspec.json.encode({"places": places, "hidden": [str(path) for path in hidden]})
        await self.write(_PLACES, given)
        return self.with_places()

    def with_places(self) -> "LocalSandbox":
        """Load the absolute paths and hidden folders that :meth:`placed` stored, if it was called."""
        with suppress(FileNotFoundError):
            given = msgspec.json.decode((self._root / _PLACES).read_bytes())
            self._places = given["places"]
            self._hidden = tuple(map(Path, given["hidden"]))
        return self

    def _seen(self, path: str) -> PurePosixPath:
        """Return the absolute path at which programs see a folder of the sandbox."""
        for name, place in self._places.items():
            if PurePosixPath(path).is_relative_to(name):
                return PurePosixPath(place, PurePosixPath(path).relative_to(name))
        return PurePosixPath(self._place(path))

    async def _end(self) -> None:
        await asyncio.gather(*(kept.kill() for kept in list(self._running)))

    def _give_up_lock(self) -> None:
        if self._lock is not None:
            _lock_file(self._root).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    async def _disk(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run file operations in a thread; a disk failure becomes :class:`SandboxError`."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, FileExistsError):
            raise
        except RecursionError:
            raise RunError(f"a folder in the sandbox {self._root} is too deep to be copied") from None
        except OSError as error:
            raise SandboxError(f"the disk of the sandbox {self._root} failed: {error}") from error

    def _place(self, path: str) -> Path:
        return self._root / checked_path(path)

    def _content(self, path: str) -> Path:
        """Return the path of a file or folder to read; a pipe counts as missing, since reading it may block forever."""
        place = self._inside(path)
        if place.exists() and not place.is_file() and not place.is_dir():
            raise FileNotFoundError(f"there is no file {path!r}, but a pipe, a socket or a device")
        return place

    def _inside(self, path: str) -> Path:
        """Return the path on this machine; raises :class:`PathError` if a link leads out of the sandbox."""
        place = self._place(path)
        if not place.resolve().is_relative_to(self._root.resolve()):
            raise PathError(f"the path {path!r} leads out of the sandbox by a link; remove that link")
        return place


def _on_cpus(number: float) -> list[str]:
    """Return the prefix of a command that restricts it to ``number`` CPUs, chosen at random; empty for all CPUs."""
    if not number:
        return []
    known = sorted(os.sched_getaffinity(0))
    program = shutil.which("taskset", path=os.defpath)
    if program is None or math.ceil(number) >= len(known):
        return []
    return [program, "-c", ",".join(map(str, random.sample(known, math.ceil(number))))]


async def _watch(kept: BoundProcess, stdin: bytes, limits: Limits, in_memory: Sequence[Path]) -> Finished:
    """Write a command's input, read its output, and stop it if it exceeds a limit."""
    printed, complaints = PrintedText(), PrintedText()
    talking = asyncio.create_task(_converse(kept.process, stdin, printed, complaints))
    watching = asyncio.create_task(_watch_usage(kept.process.pid, limits, in_memory))
    try:
        done, _ = await asyncio.wait((talking, watching), timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED)
        if talking in done:
            await talking
            return Finished(code=kept.returncode or 0, output=printed.text(), errors=complaints.text())
        name, detail = watching.result() if watching in done else ("seconds", f"{limits.seconds:g} s")
        await kept.kill()
        return Finished(code=-9, output=printed.text(), errors=complaints.text(), exceeded=name, detail=detail)
    finally:
        for task in (talking, watching):
            task.cancel()
        await asyncio.gather(talking, watching, return_exceptions=True)


async def _watch_usage(keeper: int, limits: Limits, in_memory: Sequence[Path]) -> tuple[Any, str]:
    """Wait until the processes below ``keeper`` exceed a limit; return the limit's name and the use as text.

    Files in the folders ``in_memory`` count as memory.
    """
    while True:
        await asyncio.sleep(_LOOK_S if limits.memory or limits.processes else 3600)
        usage = await asyncio.to_thread(usage_below, keeper)
        if limits.processes and len(usage.processes) > limits.processes:
            return "processes", f"{len(usage.processes)} processes of {limits.processes}"
        files = await asyncio.to_thread(file_memory, usage.processes, in_memory) if limits.memory else 0
        if limits.memory and usage.memory + files > limits.memory:
            exact = files + await asyncio.to_thread(exact_memory, usage.processes)
            if exact > limits.memory:
                return "memory", f"{exact >> 20:,} MiB of {limits.memory >> 20:,} MiB"


async def _converse(
    process: asyncio.subprocess.Process, stdin: bytes, printed: PrintedText, complaints: PrintedText
) -> None:
    assert process.stdout is not None and process.stderr is not None  # noqa: S101, PT018  # spawned with pipes
    async with asyncio.TaskGroup() as group:
        group.create_task(_feed(process, stdin))
        group.create_task(printed.read(process.stdout))
        group.create_task(complaints.read(process.stderr))
    await process.wait()


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None  # noqa: S101  # spawned with pipes
    with suppress(BrokenPipeError, ConnectionResetError):  # the program may not read its input
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


def _system_limits(limits: Limits, *, is_apart: bool) -> str:
    """Return shell commands that set limits of the system, as a backstop to our own checks.

    The number of processes is limited only with bubblewrap, where the system counts the sandbox's processes alone and
    not all processes of this user.
    """
    lines: list[str] = []
    if limits.memory:
        lines.append(f"ulimit -d {limits.memory >> 10} 2>/dev/null; ")
    if limits.processes and is_apart:
        lines.append(f"ulimit -u {limits.processes * _THREADS} 2>/dev/null; ")
    return "".join(lines)


def _make(root: Path) -> FileLock:
    """Create a sandbox's folders, and return its lock, which is held."""
    root.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock_of(_lock_file(root))
    lock.acquire()
    try:
        _remove(root)
        for name in (WORKSPACE, HOME, TEMPORARY):
            (root / name).mkdir(parents=True)
    except BaseException:
        _lock_file(root).unlink(missing_ok=True)
        lock.release()
        raise
    return lock


def _lock_file(root: Path) -> Path:
    return root.with_name(root.name + _LOCK)


def _lock_of(file: Path) -> FileLock:
    return FileLock(file, timeout=0, thread_local=False, fallback_to_soft=False)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def copy_files(source: Path, target: Path) -> None:
    """Copy a file, or the contents of a folder, without sockets, pipes and devices; links stay links."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=_special)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def _special(folder: str, names: list[str]) -> list[str]:
    """Return the names that are sockets, pipes or devices."""
    return [name for name in names if not _is_plain(Path(folder, name))]


def _is_plain(path: Path) -> bool:
    return path.is_symlink() or path.is_file() or path.is_dir()


def _make_readable(path: Path) -> None:
    """Make files and folders readable that a harness made unreadable, so that they can be copied."""
    unreadable = ["(", "-type", "d", "!", "-perm", "-500", "-o", "-type", "f", "!", "-perm", "-400", ")"]
    words = ["find", str(path), *unreadable, "-exec", "chmod", "u+rX", "{}", ";"]
    with suppress(FileNotFoundError):  # a small system may have no find
        subprocess.run(words, env={"PATH": os.defpath}, capture_output=True, check=False)


def _remove(path: Path) -> None:
    """Remove a folder, even if parts of it are read-only, or if it is nested too deeply for Python."""
    with suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        for words in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*words, "--", str(path)], env={"PATH": os.defpath}, capture_output=True, check=False)
