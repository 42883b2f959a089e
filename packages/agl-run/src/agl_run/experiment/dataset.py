"""Datasets: JSON-lines files or any sequence of tasks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agl.errors import DatasetError
from agl.schemas import Json


def load_dataset(path: Path) -> list[Json]:
    """Read the tasks in a JSON-lines file, blank lines skipped; raises :class:`DatasetError` with file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise DatasetError(f"no dataset {str(path)!r}; paths in an experiment file are relative to it") from None
    except OSError as error:
        raise DatasetError(f"cannot read the dataset {str(path)!r}: {error}") from error
    decoder = msgspec.json.Decoder()
    tasks: list[Json] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DatasetError(f"{path}:{number}: not JSON: {error}; every line must be one JSON value") from None
    if not tasks:
        raise DatasetError(f"the dataset {str(path)!r} is empty; it needs one JSON value per line")
    return tasks


def as_tasks(data: Iterable[Any] | str | Path | None, *, folder: Path, name: str) -> list[Json]:
    """Read tasks from a path, or from any iterable of JSON values."""
    if data is None or data == "":
        return []
    if isinstance(data, str | Path):
        return load_dataset(folder / data)
    tasks: list[Json] = []
    for number, task in enumerate(data):
        try:
            tasks.append(msgspec.to_builtins(task))
            msgspec.json.encode(tasks[-1])
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"{name}[{number}] is not JSON: {error}; tasks are dicts, lists, strings, numbers"
            ) from None
    return tasks


def check_hidden(tasks: Sequence[Json], hidden: Sequence[str], *, name: str) -> None:
    """Refuse hidden keys that no task has: a misspelt one would show the agent the answer."""
    for key in hidden:
        if tasks and not any(isinstance(task, dict) and key in task for task in tasks):
            raise DatasetError(f"hidden key {key!r} is in no task of {name}; check [experiment] hidden")
