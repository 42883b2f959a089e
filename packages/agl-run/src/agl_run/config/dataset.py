"""Datasets: JSON-lines files, JSON arrays, tables, or any sequence of tasks."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from agl.errors import DatasetError
from agl.hints import did_you_mean
from agl.schemas import Json, encode
from agl_run.config.tables import Tasks, is_table_file, read_table, rows_of
from agl_run.config.task_sources import read_source

_SUFFIXES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv")


def load_dataset(path: Path) -> list[Json]:
    """Read the tasks in a JSON-lines file, blank lines skipped, in one JSON array of tasks, or in a table.

    Raises:
        DatasetError: The file is missing or empty, or a line is wrong; names file and line.
    """
    try:
        if path.exists() and is_table_file(path):
            return _refuse_none(_as_json(read_table(path), name=str(path)), path, "row below its header")
        data = path.read_bytes()
    except FileNotFoundError:
        there = [p.name for p in path.parent.glob("*") if p.suffix in _SUFFIXES]
        hint = did_you_mean(path.name, there, otherwise="paths in an experiment file are relative to it")
        raise DatasetError(f"no dataset {str(path)!r}; {hint}") from None
    except IsADirectoryError:
        raise DatasetError(f"the dataset {str(path)!r} is a directory; name a JSON-lines file in it") from None
    except OSError as error:
        raise DatasetError(f"cannot read the dataset {str(path)!r}: {error}") from error
    array = _array(data)
    if array is not None:
        tasks = {f"task {number}": task for number, task in enumerate(array, start=1)}
    else:
        tasks = {f"line {number}": task for number, task in _lines(data, path)}
    _refuse_large_integers(tasks, path)
    _refuse_a_mixture(tasks, path)
    return _refuse_none(list(tasks.values()), path, "JSON value per line")


def _refuse_none(tasks: list[Json], path: Path, unit: str) -> list[Json]:
    if not tasks:
        raise DatasetError(f"the dataset {str(path)!r} is empty; it needs one {unit}")
    return tasks


def _array(data: bytes) -> list[Json] | None:
    """Return the tasks if the whole file is one JSON array."""
    if not data.lstrip().startswith(b"["):
        return None
    try:
        return msgspec.json.decode(data, type=list[Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _lines(data: bytes, path: Path) -> Iterator[tuple[int, Json]]:
    decoder = msgspec.json.Decoder()
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DatasetError(
                f"{path}:{number}: not JSON: {error}; every line must be one JSON value, or the whole file one array"
            ) from None


def _refuse_large_integers(tasks: Mapping[str, Json], path: Path) -> None:
    for place, task in tasks.items():
        try:
            encode(task)
        except OverflowError as error:
            raise DatasetError(
                f"{path}, {place}: no store takes the task: {error}; write the number as a text"
            ) from None


def _refuse_a_mixture(tasks: Mapping[str, Json], path: Path) -> None:
    """Refuse the first task that is no object, where others are."""
    others = [place for place, task in tasks.items() if not isinstance(task, dict)]
    if others and len(others) < len(tasks):
        raise DatasetError(
            f"{path}, {others[0]}: {str(tasks[others[0]])[:60]!r} is no object, and other tasks are; "
            "write every task as an object with the same keys"
        )


def as_tasks(data: Tasks | None, *, folder: Path, name: str) -> list[Json]:
    """Read tasks from a path, a package's ``KIND:NAME``, a data frame, or any iterable of JSON values."""
    if data is None or (isinstance(data, str) and not data):
        return []
    tasks = read_source(data, folder=folder) if isinstance(data, str) else None
    if tasks is not None:
        return tasks
    if isinstance(data, str | Path):
        return load_dataset(folder / data)
    return _as_json(rows_of(data, name=name), name=name)


def _as_json(rows: Iterable[Any], *, name: str) -> list[Json]:
    tasks: list[Json] = []
    for number, task in enumerate(rows):
        try:
            tasks.append(msgspec.to_builtins(task, builtin_types=(bytes, bytearray, memoryview)))
            json.dumps(tasks[-1])  # refuses bytes, of which msgspec makes texts
            encode(tasks[-1])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DatasetError(
                f"{name}[{number}] is not JSON: {error}; tasks are dicts, lists, strings, numbers"
            ) from None
    return tasks


def check_hidden(tasks: Sequence[Json], hidden: Sequence[str], *, name: str) -> None:
    """Refuse hidden keys that no task has: a misspelt one would show the agent the answer."""
    for key in hidden:
        if tasks and not any(isinstance(task, dict) and key in task for task in tasks):
            keys = sorted(
                {found for task in tasks if isinstance(task, dict) for found in cast("dict[str, Json]", task)}
            )
            hint = did_you_mean(key, keys, otherwise=f"the keys of tasks are {keys[:8]}")
            raise DatasetError(f"hidden key {key!r} is in no task of {name}; check [experiment] hidden; {hint}")


def unkeyed_tasks(*datasets: Sequence[Json]) -> list[str]:
    """Describe tasks that are no objects; they have no keys that could be hidden, compared or put into a prompt."""
    first = next((task for tasks in datasets for task in tasks if not isinstance(task, dict)), None)
    if first is None:
        return []
    return [
        f"the task {str(first)[:60]!r} is no object; rewards and prompts that read a key of the task, such as answer, "
        'need objects: {"question": "...", "answer": "..."}'
    ]
