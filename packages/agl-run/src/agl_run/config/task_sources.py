"""Tasks that a package reads: ``train = "KIND:NAME"`` finds the kind in the entry-point group ``agl_tasks``.

An entry is a function of the name and the experiment's folder that returns the tasks, or raises
:class:`agl.errors.DatasetError`.
"""

import re
from importlib.metadata import entry_points
from pathlib import Path

from agl.errors import DatasetError
from agl.schemas import Json

GROUP = "agl_tasks"
"""The entry-point group of packages that read tasks."""

_KIND = re.compile(r"([a-z][a-z0-9_-]+):(?!/{2}|\\)(.+)")


def read_source(given: str, *, folder: Path) -> list[Json] | None:
    """Return the tasks of ``KIND:NAME``; ``None`` for a text that names a file.

    Raises:
        DatasetError: The tasks cannot be read, or the package that reads them cannot be imported.
    """
    match = _KIND.fullmatch(given)
    if match is None or (folder / given).exists():
        return None
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if match[1] not in found:
        return None
    try:
        read = found[match[1]].load()
    except (ImportError, AttributeError) as error:
        raise DatasetError(f"tasks of {match[1]!r} cannot be read: {error}; install the package again") from error
    return read(match[2], folder)
