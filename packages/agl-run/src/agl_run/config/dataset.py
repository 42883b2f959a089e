"""Datasets: JSON-lines files, JSON arrays, tables, or any sequence of tasks."""

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from agl.errors import DatasetError
from agl.hints import did_you_mean
from agl.schemas import Json, encode

_LONGEST = 1 << 28
"""The most characters in one value of a CSV file; Python's own limit of 131,072 is too low for documents."""

_SUFFIXES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv")


class Table(Protocol):
    """A data frame, such as those of pandas and polars."""

    @property
    def columns(self) -> Any:
        """The names of the columns, which are the keys of the tasks."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...


Tasks = Iterable[Json] | Table | str | Path
"""Accepted forms of tasks: an iterable, a data frame or data set with one task per row, or the path of a file."""


def load_dataset(path: Path) -> list[Json]:
    """Read the tasks from a table, from a file with one JSON array, or from a JSON-lines file; blank lines are skipped.

    Raises:
        DatasetError: The file is missing or empty, or a task is wrong; the message names the file and the line or row.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # reading a named pipe would wait for its writer
            raise DatasetError(f"the dataset {str(path)!r} is not a file; write its tasks to one")
        # Folders of ``datasets`` are tables too, so this comes before the file is read.
        if path.exists() and is_table_file(path):
            return _refuse_none(_as_json(read_table(path), name=str(path)), path, "row below its header")
        data = path.read_bytes()
        data = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        there = [p.name for p in path.parent.glob("*") if p.suffix in _SUFFIXES]
        hint = did_you_mean(path.name, there, otherwise="paths in an experiment file are relative to it")
        raise DatasetError(f"no dataset {str(path)!r}; {hint}") from None
    except IsADirectoryError:
        raise DatasetError(f"the dataset {str(path)!r} is a directory; name a JSON-lines file in it") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"cannot read the dataset {str(path)!r}: {error}") from error
    # A file that begins with a bracket is either one array, or JSON lines of which each is an
    # array.
    array = _array(data)
    if array is not None:
        tasks = {f"task {number}": task for number, task in enumerate(array, start=1)}
    else:
        tasks = {f"line {number}": task for number, task in _lines(data, path)}
    # The store would refuse such a task in the middle of a run.
    _refuse_large_integers(tasks, path)
    _refuse_a_mixture(tasks, path)
    return _refuse_none(list(tasks.values()), path, "JSON value per line")


def _refuse_none(tasks: list[Json], path: Path, unit: str) -> list[Json]:
    if not tasks:
        raise DatasetError(f"the dataset {str(path)!r} is empty; it needs one {unit}")
    return tasks


def _array(data: bytes) -> list[Json] | None:
    """Return the tasks if the whole file is one JSON array, else ``None``."""
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
            # Python writes NaN, which JSON lacks.
            yield number, json.loads(line, parse_constant=_constant) if b"NaN" in line else decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"{path}:{number}: not JSON: {error}; every line must be one JSON value, or the whole file one array"
            ) from None


def _constant(name: str) -> None:
    if name != "NaN":
        raise ValueError(f"{name} is not a number in JSON")


def _refuse_large_integers(tasks: Mapping[str, Json], path: Path) -> None:
    for place, task in tasks.items():
        try:
            encode(task)
        except OverflowError as error:
            raise DatasetError(
                f"{path}, {place}: no store takes the task: {error}; write the number as a text"
            ) from None


def _refuse_a_mixture(tasks: Mapping[str, Json], path: Path) -> None:
    """Refuse a file in which only some of the tasks are objects."""
    others = [place for place, task in tasks.items() if not isinstance(task, dict)]
    if others and len(others) < len(tasks):
        raise DatasetError(
            f"{path}, {others[0]}: {str(tasks[others[0]])[:60]!r} is not an object, and other tasks are; "
            "write every task as an object with the same keys"
        )


def as_tasks(data: Tasks | None, *, folder: Path, name: str) -> list[Json]:
    """Return tasks that are given as a path, as ``KIND:NAME``, as a data frame, or as an iterable.

    With ``KIND:NAME``, a package reads the tasks; see :func:`read_source`.
    """
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
            tasks.append(msgspec.to_builtins(task, builtin_types=(bytes, bytearray, memoryview), enc_hook=_as_list))
            try:
                json.dumps(tasks[-1], allow_nan=False)  # also refuses bytes, which msgspec would convert to text
            except ValueError:
                tasks[-1] = _without_nan(tasks[-1])
                json.dumps(tasks[-1])
            encode(tasks[-1])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DatasetError(
                f"{name}[{number}] is not JSON: {error}; tasks are dicts, lists, strings, numbers"
            ) from None
    return tasks


def _as_list(value: Any) -> Any:
    """Convert a numpy array or number, which the cells of data frames may hold, to JSON types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _without_nan(value: Any) -> Any:
    """Replace NaN by ``None``, which represents a missing number in every format."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in cast("list[Any]", value)]
    return None if value != value else value


def check_hidden(tasks: Sequence[Json], hidden: Sequence[str], *, name: str) -> None:
    """Refuse a hidden key that no task has, because a misspelt key would show the agent the answer."""
    for key in hidden:
        # One task that has the key is enough: keys may be optional.
        if tasks and not any(isinstance(task, dict) and key in task for task in tasks):
            keys = sorted(
                {found for task in tasks if isinstance(task, dict) for found in cast("dict[str, Json]", task)}
            )
            hint = did_you_mean(key, keys, otherwise=f"the keys of tasks are {keys[:8]}")
            raise DatasetError(f"hidden key {key!r} is in no task of {name}; check [experiment] hidden; {hint}")


def unkeyed_tasks(*datasets: Sequence[Json]) -> list[str]:
    """Return a warning if a task is not an object; such a task has no keys for hiding, rewards or prompts."""
    first = next((task for tasks in datasets for task in tasks if not isinstance(task, dict)), None)
    if first is None:
        return []
    return [
        f"the task {str(first)[:60]!r} is not an object; rewards and prompts that read a key of the task, such as "
        'answer, need objects: {"question": "...", "answer": "..."}'
    ]


GROUP = "agl_tasks"
"""The entry-point group in which packages register their readers of tasks."""

_KIND = re.compile(r"([a-z][a-z0-9_-]+):(?!/{2}|\\)(.+)")


def read_source(given: str, *, folder: Path) -> list[Json] | None:
    """Return the tasks of ``KIND:NAME``, read by the package that registers ``KIND``.

    Returns ``None`` if ``given`` is a file, or if no package registers ``KIND``.

    Raises:
        DatasetError: The tasks cannot be read, or the package that reads them cannot be imported.
    """
    match = _KIND.fullmatch(given)
    # A file comes first: its name may hold a colon.
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


def is_table_file(path: Path) -> bool:
    """Return true for a CSV, TSV or Parquet file, or a folder saved by ``datasets``."""
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    return saved or path.suffix.lower() in (".csv", ".tsv", ".parquet")


def read_table(path: Path) -> Iterable[Json]:
    """Read the rows of a CSV, TSV or Parquet file, or of a folder written by ``save_to_disk`` of ``datasets``.

    Raises:
        DatasetError: The file cannot be read, or the library that reads it is not installed.
    """
    if path.is_dir():
        return rows_of(_needed("datasets", path).load_from_disk(str(path)), name=str(path))
    if path.suffix.lower() != ".parquet":
        return list(_rows_of_csv(path))
    try:
        return _needed("pyarrow.parquet", path).read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot read the dataset {str(path)!r} as Parquet: {error}") from None


def rows_of(data: Any, *, name: str) -> Iterable[Json]:
    """Return the rows of a data frame, of an Arrow table or of any iterable.

    Raises:
        DatasetError: ``data`` is a mapping, for example from split names to data sets.
    """
    if isinstance(data, Mapping):
        splits = cast("Mapping[Any, Any]", data)
        kind, keys = type(splits).__name__, list(splits)
        raise DatasetError(
            f"{name} is a {kind} with the keys {keys[:8]}, not a list of tasks; name one of them if each is a split of "
            "a data set, or pass [task] for a single task"
        )
    if hasattr(data, "columns") and hasattr(data, "notna"):  # pandas: None instead of NaN, which JSON lacks
        return data.astype(object).where(data.notna(), None).to_dict("records")
    for method in ("to_dicts", "to_pylist"):  # polars, Arrow
        if hasattr(data, method):
            return getattr(data, method)()
    return data


def _rows_of_csv(path: Path) -> Iterator[Json]:
    """Yield one task per row below the header of a CSV or TSV file; every value is text."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.readline()
            file.seek(0)
            # Spreadsheets of some countries separate by semicolons.
            separator = ";" if ";" in start and "," not in start else ","
            csv.field_size_limit(_LONGEST)
            lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else separator, strict=True)
            header = next(lines, list[str]())
            # The second column would silently replace the first in every task.
            if len(set(header)) != len(header):
                raise DatasetError(f"{path}:1: two columns have one name: {header}; give each its own")
            for line in lines:
                if line and len(line) != len(header):
                    raise DatasetError(
                        f"{path}:{lines.line_num}: {len(line)} values for the {len(header)} columns {header}; "
                        "write a value that contains the separator in double quotes"
                    )
                if line:
                    yield dict(zip(header, line, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read the dataset {str(path)!r} as CSV: {error}") from None


def _needed(module: str, path: Path) -> Any:
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise DatasetError(f"reading the dataset {str(path)!r} needs {name}; run: pip install {name}") from None
