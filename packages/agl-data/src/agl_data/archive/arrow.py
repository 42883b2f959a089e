"""Writes and reads Parquet files piece by piece, so that memory stays bounded, and converts values to columns and back.

Packed token ids and log-probabilities become lists of int32 and float32 without a Python object for each number. JSON
becomes text, and times become timestamps. A value is moved out of its record only if its column returns it exactly.
Any other value stays in the record, and its column holds the nearest value that the column's type allows.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from agl.errors import ConfigError
from agl.hints import count_of, pip_install
from agl.schemas import encode, from_json, to_json
from agl_data.archive.layout import FORMAT, damaged, newer
from agl_data.archive.places import Place

try:
    _pa: Any = import_module("pyarrow")  # untyped
    _parquet: Any = import_module("pyarrow.parquet")
except ImportError:
    raise ConfigError(
        f"archives are Parquet files, which need one more package; run: {pip_install('agl-data[parquet]')}"
    ) from None

Kind: TypeAlias = Literal["text", "texts", "int", "float", "bool", "time", "bytes", "ids", "floats"]
"""The type of a column; ``ids`` and ``floats`` are packed numbers of 32 bits, ``time`` counts microseconds."""

Row: TypeAlias = dict[str, Any]

_ROWS, _BYTES = 5_000, 8 << 20
"""Largest numbers of rows and of bytes in a row group; a single row may have more bytes."""

_PAGE = 1_000
"""The largest number of rows that are read at once."""

_MOST = 128 << 20
"""The most bytes of one column of a row group, and about the most that are read at once from a column."""

_TYPES: dict[Kind, Any] = {
    "text": _pa.string(),
    "texts": _pa.list_(_pa.string()),
    "int": _pa.int64(),
    "float": _pa.float64(),
    "bool": _pa.bool_(),
    "time": _pa.timestamp("us", tz="UTC"),
    "bytes": _pa.binary(),
    "ids": _pa.list_(_pa.int32()),
    "floats": _pa.list_(_pa.float32()),
}
_NUMBERS: dict[str, Any] = {"ids": _pa.int32(), "floats": _pa.float32()}
_VERSION = b"agl-data"

_MICRO = 1_000_000
_MOST_MICROS = 253_402_300_800 * _MICRO
"""The start of the year 10000 in Unix microseconds; many libraries cannot represent later times."""


class TableWriter:
    """Writes rows to a local Parquet file, which is complete once :meth:`close` returns.

    Attributes:
        count: Number of rows added so far.
    """

    def __init__(self, path: Path, columns: Mapping[str, Kind]) -> None:
        fields = [_pa.field(name, _TYPES[kind]) for name, kind in columns.items()]
        self._schema = _pa.schema(fields, metadata={_VERSION: str(FORMAT).encode()})
        self._columns = dict(columns)
        texts = [name for name, kind in columns.items() if kind == "text"]
        self._file = _parquet.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            use_dictionary=texts,  # a dictionary of floats would turn all NaN bit patterns into one
            column_encoding={
                f"{name}.list.element": "BYTE_STREAM_SPLIT" for name, kind in columns.items() if kind == "floats"
            },
            write_page_checksum=True,
        )
        self._rows: list[Row] = []
        self._bytes = 0
        self.count = 0

    def add(self, row: Row) -> int:
        """Add a row, which may lack columns; returns its approximate size in bytes."""
        size = sum(len(value) for value in row.values() if isinstance(value, str | bytes))
        self._rows.append(row)
        self._bytes += size
        self.count += 1
        if len(self._rows) >= _ROWS or self._bytes >= _BYTES:
            self._flush()
        return size

    def close(self) -> None:
        """Write the remaining rows and the end of the file."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        if self._rows:
            columns = [_column(kind, [row.get(name) for row in self._rows]) for name, kind in self._columns.items()]
            self._file.write_table(_pa.Table.from_arrays(columns, schema=self._schema))
        self._rows, self._bytes = [], 0


def write_table(path: Path, columns: Mapping[str, Kind], rows: Iterable[Row]) -> None:
    """Write all rows to a Parquet file."""
    writer = TableWriter(path, columns)
    try:
        for row in rows:
            writer.add(row)
    finally:
        writer.close()


def read_rows(
    path: Path, columns: Mapping[str, Kind], *, place: Place, name: str, count: int | None = None
) -> Iterator[Row]:
    """Read columns of an archive's file from its local copy, row by row.

    Args:
        path: The local copy.
        columns: The columns to read.
        place: The archive, for messages.
        name: The file's name in the archive, for messages.
        count: The number of rows that the file must have; ``None`` for any number.

    Raises:
        DamagedArchiveError: The file is not Parquet, is damaged, or lacks a column or rows.
        SchemaVersionError: A newer release wrote the file.
    """
    try:
        with _parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 20) as file:
            _check(file.schema_arrow, columns, place, name)
            if count not in (None, file.metadata.num_rows):
                rows = count_of(file.metadata.num_rows, "row")
                raise damaged(place, name, f"it has {rows} and should have {count:,}")
            largest = _largest_chunk(file.metadata)
            if largest > _MOST:
                raise damaged(place, name, f"it has values of {largest >> 20:,} MiB, and {_MOST >> 20} are allowed")
            # Repeated values are stored once, so a small file may hold many large rows.
            for batch in file.iter_batches(batch_size=max(1, min(_PAGE, _MOST // largest)), columns=list(columns)):
                values = [_values(kind, batch.column(column)) for column, kind in columns.items()]
                for row in zip(*values, strict=True):
                    yield dict(zip(columns, row, strict=True))
    except (_pa.ArrowException, OSError) as error:
        raise damaged(place, name, " ".join(str(error).split())) from error


def _largest_chunk(metadata: Any) -> int:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(column) for group in groups for column in range(group.num_columns)]
    return max((int(chunk.total_uncompressed_size) for chunk in chunks), default=1) or 1


def _check(schema: Any, columns: Mapping[str, Kind], place: Place, name: str) -> None:
    metadata: dict[bytes, bytes] = schema.metadata or {}
    version = metadata.get(_VERSION, b"")
    if not version.isdigit():
        raise damaged(place, name, "it is not a table of an archive")
    if int(version) > FORMAT:
        raise newer(place, name, int(version))
    for column, kind in columns.items():
        if column not in schema.names or schema.field(column).type != _TYPES[kind]:
            raise damaged(place, name, f"its column {column!r} is missing or has another type")


def _column(kind: Kind, values: Sequence[Any]) -> Any:
    if kind not in _NUMBERS:
        return _pa.array(values, type=_TYPES[kind])
    ends = itertools.accumulate((len(value or b"") // 4 for value in values), initial=0)
    data = b"".join(value or b"" for value in values)
    numbers = _pa.Array.from_buffers(_NUMBERS[kind], len(data) // 4, [None, _pa.py_buffer(data)])
    absent = _pa.array([value is None for value in values])
    return _pa.ListArray.from_arrays(_pa.array(ends, type=_pa.int32()), numbers, type=_TYPES[kind], mask=absent)


def _values(kind: Kind, column: Any) -> list[Any]:
    if kind not in _NUMBERS:
        return (column.cast(_pa.int64()) if kind == "time" else column).to_pylist()
    numbers = column.values
    data = numbers.buffers()[1]
    first = numbers.offset
    places = itertools.pairwise(column.offsets.to_pylist())
    return [
        bytes(data[4 * (first + start) : 4 * (first + end)]) if is_there and end > start else b"" if is_there else None
        for (start, end), is_there in zip(places, column.is_valid().to_pylist(), strict=True)
    ]


def row_of(record: Any, columns: Mapping[str, Kind]) -> Row:
    """Return a record's fields as the columns of the same names, with integers and times converted.

    A field that is not a string becomes JSON in a column of text.
    """
    found = {name: getattr(record, name) for name in columns if hasattr(record, name)}
    return {name: _as_column(value, columns[name]) for name, value in found.items()}


def _as_column(value: Any, kind: Kind) -> Any:
    match kind:
        case "int":
            return integer(value)
        case "time":
            return micros(value)
        case "text" if value is not None and not isinstance(value, str):
            return json_text(value)[0]
        case _:
            return value


def json_text(value: Any) -> tuple[str, bool]:
    """Return a value as JSON text, and true if decoding the text gives the same value."""
    data = to_json(value)
    try:
        is_exact = encode(from_json(data, object)) == encode(value)
    except msgspec.DecodeError:
        is_exact = False
    return data.decode(), is_exact


def micros(seconds: float) -> int | None:
    """Return Unix seconds as microseconds; ``None`` for 0, which stands for no time, and for values out of range."""
    return _time(round(seconds * _MICRO)) if math.isfinite(seconds) else None


def micros_of_ns(nanoseconds: int) -> int | None:
    """Return Unix nanoseconds as microseconds; ``None`` for 0, which means no time, and for values out of range."""
    return _time(nanoseconds // 1000)


def integer(value: Any) -> int | None:
    """Return the value if it is an integer of 64 bits, else ``None``."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and -(1 << 63) <= value < 1 << 63 else None


def _time(value: int) -> int | None:
    return value if 0 < value < _MOST_MICROS else None
