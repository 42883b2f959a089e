"""Writes generated files without overwriting files that somebody has edited.

A list of digests next to the files records the written contents. A file that still has the recorded digest may be
replaced; a file with another digest was edited.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

from agl.errors import ConfigError

DIGESTS = ".agl-deploy.json"
"""Name of the list of digests, in the folder of the files."""

_SHOWN = 10

State = Literal["new", "changed", "same", "edited"]


def states(folder: Path, files: Mapping[str, str]) -> dict[str, State]:
    """Compare the files to write with those in the folder.

    Args:
        folder: The folder for the files, which need not exist.
        files: Contents by path below ``folder``.

    Returns:
        The state of each file, by path: ``new`` if it does not exist, ``same`` if it has the new contents, ``changed``
        if it has the contents that were generated earlier, else ``edited``.

    Raises:
        ConfigError: A folder below ``folder`` is a link that leads out of ``folder``.
    """
    known = _digests(folder)
    for path in files:
        if not (folder / path).parent.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{str((folder / path).parent)!r} is a link to a folder elsewhere; remove it, or choose another "
                "--output"
            )
    return {path: _state(folder / path, text, known.get(path, "")) for path, text in files.items()}


def write(folder: Path, files: Mapping[str, str], *, force: bool) -> dict[str, State]:
    """Write the files, and return the states that :func:`states` gave before.

    Args:
        folder: The folder for the files.
        files: Contents by path below ``folder``.
        force: Replace edited files too.

    Raises:
        ConfigError: A file was edited and ``force`` is false, so nothing was written; or a file cannot be written.
    """
    found = states(folder, files)
    edited = sorted(path for path, state in found.items() if state == "edited")
    if edited and not force:
        more = f" and {len(edited) - _SHOWN} more" if len(edited) > _SHOWN else ""
        raise ConfigError(
            f"{str(folder)!r} has files that were edited or come from elsewhere: {', '.join(edited[:_SHOWN])}{more}; "
            "nothing was written. Compare them with what --dry-run prints, pass --force to replace them, or choose "
            "another --output"
        )
    kept = _digests(folder) | {path: _digest(text.encode()) for path, text in files.items()}
    listed = json.dumps(dict(sorted(kept.items())), indent=1) + "\n"
    for path, text in {**files, DIGESTS: listed}.items():
        _replace(folder / path, text)
    return found


def _state(path: Path, text: str, known: str) -> State:
    if not path.exists() and not path.is_symlink():
        return "new"
    there = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    if there == text.encode():
        return "same"
    return "changed" if there is not None and _digest(there) == known else "edited"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests by path; empty if the list is missing or invalid, and then existing files count as edited."""
    try:
        found: object = json.loads((folder / DIGESTS).read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, str]", found) if isinstance(found, dict) else {}


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees either the old contents or the new ones."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; choose another --output") from error
