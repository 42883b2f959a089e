"""Tasks from tables: CSV and Parquet files, data frames of pandas and polars, data sets of Hugging Face.

A row is a task, and its columns are the task's keys. Frames and data sets are known by their methods, so that their
libraries are never imported for them; pyarrow and datasets are imported for the files that need them.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from agl.errors import DatasetError
from agl.schemas import Json


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
"""Tasks, a data frame or data set with a row for each, or the path of a file of them."""


def is_table_file(path: Path) -> bool:
    """Return true for a file or a folder that :func:`read_table` reads."""
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
        DatasetError: ``data`` maps names to something, such as splits to data sets.
    """
    if isinstance(data, Mapping):
        splits = cast("Mapping[Any, Any]", data)
        kind, keys = type(splits).__name__, list(splits)
        raise DatasetError(
            f"{name} is a {kind} with the keys {keys[:8]}, not a list of tasks; name one of them if each is a split of "
            "a data set, or pass [task] for a single task"
        )
    if hasattr(data, "columns") and hasattr(data, "notna"):  # pandas: None instead of NaN, which is no JSON
        return data.astype(object).where(data.notna(), None).to_dict("records")
    for method in ("to_dicts", "to_pylist"):  # polars, Arrow
        if hasattr(data, method):
            return getattr(data, method)()
    return data


def _rows_of_csv(path: Path) -> Iterator[Json]:
    """Yield the lines below the header; every value is a text."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            header = next(lines, list[str]())
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
