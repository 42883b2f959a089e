"""Virtual environments of the sessions, one for each set of requirements.

Sessions that need the same share one, and it is kept until what they need changes: a requirement, the interpreter, or
the ``pyproject.toml`` of a package that is installed from this checkout. Nothing else is ever installed in it, so that
a package is still tested beside what it needs and nothing more.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nox
from filelock import FileLock  # comes with nox

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".nox"
DONE = "installed.txt"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment in which everything is installed."""

    folder: Path

    def run(
        self, session: nox.Session, *words: str, variables: Mapping[str, str] | None = None, may_fail: bool = False
    ) -> None:
        """Run one of its programs; the session fails with it, unless it may fail.

        Bytecode is kept, even where a container asks for none: tests start hundreds of processes, and each would
        compile what it imports.
        """
        path = os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", "")])
        env = {"PATH": path, "VIRTUAL_ENV": str(self.folder), "PYTHONDONTWRITEBYTECODE": "", **(variables or {})}
        codes = range(256) if may_fail else (0,)
        session.run(str(self.folder / "bin" / words[0]), *words[1:], env=env, external=True, success_codes=codes)


def environment(
    session: nox.Session, requirements: Sequence[str], *, python: str = "", alone: Sequence[str] = (), label: str = ""
) -> Environment:
    """The environment that has ``requirements`` (arguments of ``pip install``), made if it is not there yet.

    ``python`` is a version such as ``3.12``; the default is the interpreter that runs nox. ``alone`` is installed
    afterwards, without what it requires. ``.nox/<label>``, by default the session's name, leads to the environment,
    and one that nothing leads to any more is removed.
    """
    program = shutil.which(f"python{python}") if python else sys.executable
    if program is None:
        session.skip(f"python{python} is not installed here")
    folder = FOLDER / "env" / _fingerprint([*requirements, *alone], program)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "env" / "links.lock"):
        _link(FOLDER / (label or session.name), folder)
        _sweep(folder.parent)
    with FileLock(f"{folder}.lock"):
        if not (folder / DONE).exists():
            _make(session, folder, requirements, alone, program)
    return Environment(folder=folder)


def _fingerprint(requirements: Sequence[str], program: str) -> str:
    """Return a name of everything that an environment depends on, with its path: programs hold it in line one."""
    files = [ROOT / name.partition("[")[0] / "pyproject.toml" for name in requirements if name.startswith("packages/")]
    files += [ROOT / name for name in requirements if name.endswith(".txt")]
    parts = [str(ROOT), program, sys.version if program == sys.executable else "", *sorted(requirements)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in sorted(path for path in files if path.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _link(link: Path, folder: Path) -> None:
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)


def _sweep(folder: Path) -> None:
    """Remove environments that no session leads to."""
    used = {link.readlink() for link in FOLDER.iterdir() if link.is_symlink()}
    for environment in folder.iterdir():
        if environment.is_dir() and environment not in used:
            shutil.rmtree(environment, ignore_errors=True)
            environment.with_name(f"{environment.name}.lock").unlink(missing_ok=True)


def _make(session: nox.Session, folder: Path, requirements: Sequence[str], alone: Sequence[str], program: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin" / "python")
    if uv := find_uv():
        session.run(uv, "venv", "-q", "--python", program, str(folder), external=True)
        install = [uv, "pip", "install", "-q", "--python", python]
    else:
        session.run(program, "-m", "venv", str(folder), external=True)
        install = [python, "-m", "pip", "install", "-q"]
    # Packages of this checkout that are named on the command line, uv builds anew for each environment.
    wanted = folder / "requirements.txt"
    wanted.write_text(_lines(requirements), encoding="utf-8")
    session.run(*install, "-r", str(wanted), external=True)
    if alone:
        session.run(*install, "--no-deps", *alone, external=True)
    wanted.rename(folder / DONE)


def _lines(requirements: Sequence[str]) -> str:
    """Return requirements as the lines of a file that pip and uv read alike, also where a folder's name has a space.

    They look for packages in the current folder, the root, but for files of ``-r`` beside the file that names them.
    """
    return "".join(f"{each} " if each in ("-e", "-r") else f"{_found(each)}\n" for each in requirements)


def _found(requirement: str) -> str:
    if not requirement.startswith("packages/"):
        return requirement
    return f'"{ROOT / requirement}"' if requirement.endswith(".txt") else f"./{requirement}"


def find_uv() -> str:
    """The uv beside this interpreter or on the path that runs; ``""`` without one (pyenv's shims may lead nowhere)."""
    for program in (str(Path(sys.executable).with_name("uv")), shutil.which("uv")):
        if program and Path(program).exists() and not subprocess.run([program, "-V"], capture_output=True).returncode:
            return program
    return ""
