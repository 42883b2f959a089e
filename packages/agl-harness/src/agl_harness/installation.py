"""Installs harnesses from npm and PyPI, each into its own folder, and finds installed ones.

A harness that agl installed takes precedence over one on the ``PATH``, because its version is the one in the table of
harnesses. Nothing is installed into the system or into this Python's environment.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from agl.errors import ConfigError, RunError
from agl.schemas import Record
from agl_harness.table import Harness
from agl_inspect.keys import state_dir

FOLDER_ENV = "AGL_HARNESSES"
"""Environment variable with the folder for installed harnesses; by default a folder in this user's state directory."""

_VERSION = re.compile(r"\d+\.\d+[\w.+-]*")
_VERSION_S = 60.0
_SHOWN = 1_500


class Program(Record, frozen=True, kw_only=True):
    """An installed harness.

    Attributes:
        path: Path of the harness's program.
        is_ours: True if agl installed it.
    """

    path: str
    is_ours: bool

    @property
    def search_path(self) -> str:
        """This process's ``PATH`` with the program's folder in front."""
        return os.pathsep.join([str(Path(self.path).parent), os.environ.get("PATH", os.defpath)])


def place(harness: Harness) -> Path:
    """Return the folder in which a harness is installed; the folder's name includes the version, if it is pinned."""
    base = Path(os.environ.get(FOLDER_ENV) or state_dir() / "harnesses")
    return base / (f"{harness.name}-{harness.pin}" if harness.pin else harness.name)


def locate(harness: Harness) -> Program | None:
    """Return the program of a harness; ``None`` if it is not installed."""
    for folder in ("node_modules/.bin", "bin"):
        found = shutil.which(harness.program, path=str(place(harness) / folder))
        if found and "/" not in harness.program:
            return Program(path=found, is_ours=True)
    found = shutil.which(harness.program)
    return Program(path=found, is_ours=False) if found else None


def require(harness: Harness) -> Program:
    """Return the program of a harness; raises :class:`ConfigError` with the remedy if it is not installed."""
    found = locate(harness)
    if found is None:
        raise ConfigError(
            f"{harness.label} is not installed: there is no program {harness.program!r}; {remedy(harness)}"
        )
    return found


def remedy(harness: Harness) -> str:
    """Return an instruction for people on how to install a harness."""
    if harness.npm and shutil.which("npm") is None:
        return f"install Node.js, which brings npm, and then run: agl harness install {harness.name}"
    if not (harness.npm or harness.pip):
        return "install it so that it is on the PATH, or add npm or pip to its entry"
    if harness.folder:
        return f"install {harness.npm or ' '.join(harness.pip)}"
    return f"run: agl harness install {harness.name}"


def version_of(program: Program, harness: Harness) -> str:
    """Return the version that a program prints when run with an empty home folder; ``""`` if it prints none."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": program.search_path, "HOME": home, "TERM": "dumb"}
        try:
            printed = subprocess.run(
                [program.path, *harness.version],
                env=environment,
                cwd=home,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=_VERSION_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
    found = _VERSION.search((printed.stdout + printed.stderr).decode(errors="replace"))
    return found[0].rstrip(".") if found else ""


def install(harness: Harness) -> Program:
    """Install a harness into its folder unless it is installed there; replaces a partial installation.

    Raises:
        ConfigError: The harness's entry names no package, or npm or the required Python is missing.
        RunError: The installation failed; the message has the end of its output.
    """
    folder = place(harness)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        found = locate(harness)
        if found is not None and found.is_ours:
            return found
        shutil.rmtree(folder, ignore_errors=True)
        try:
            for command in _commands(harness, folder):
                _run(command, harness)
            found = locate(harness)
            if found is None or not found.is_ours:
                raise RunError(f"{harness.label} was installed and brought no program {harness.program!r}")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return found


def _commands(harness: Harness, folder: Path) -> list[list[str]]:
    if harness.npm:
        if not (npm := shutil.which("npm")):
            raise ConfigError(f"{harness.label} comes from npm, which is not installed; {remedy(harness)}")
        return [[npm, "install", "--no-fund", "--no-audit", "--loglevel=error", "--prefix", str(folder), harness.npm]]
    if harness.pip:
        pip = str(folder / "bin" / "pip")
        return [[_python(harness), "-m", "venv", str(folder)], [pip, "install", "--quiet", *harness.pip]]
    raise ConfigError(f"the entry of {harness.label} names no package; {remedy(harness)}")


def _python(harness: Harness) -> str:
    """Return the path of a Python of the release that the harness needs."""
    if harness.python in ("", f"{sys.version_info.major}.{sys.version_info.minor}"):
        return sys.executable
    found = shutil.which(f"python{harness.python}")
    if found is None:
        raise ConfigError(
            f"{harness.label} needs Python {harness.python}, and there is no python{harness.python} on the PATH; "
            "install that release of Python too"
        )
    return found


def _run(command: Sequence[str], harness: Harness) -> None:
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise RunError(f"{harness.label} was not installed: {command[0]} cannot be started: {error}") from error
    if done.returncode != 0:
        printed = (done.stderr or done.stdout).decode(errors="replace").strip()[-_SHOWN:]
        raise RunError(f"{harness.label} was not installed; {Path(command[0]).name} says: {printed}")
