"""Reads JSON records in bounded memory, from JSON lines or one document, plain or compressed with gzip or zstd.

This module knows no format of runs. Every error names the file, the line and the next step.
"""

import gzip
import importlib
import json
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, cast

import msgspec

from agl.errors import DatasetError
from agl.schemas import Json
from agl_data.importing.values import as_list
from agl_data.json_values import storable

MAX_RECORD = 64 << 20
"""Largest size of one record in bytes; a record is a line, or a document that spans several lines."""

MAX_GROWTH, FREE = 200, 64 << 20
"""A compressed file may unpack to ``FREE`` bytes, or to ``MAX_GROWTH`` times its own size if that is more."""

ZSTD = b"(\xb5/\xfd"
"""The first bytes of every file compressed with zstd."""

_GZIP, _ZIPS = b"\x1f\x8b", (b"PK\x03\x04", b"BZh", b"\xfd7zXZ")
_WINDOW = MAX_RECORD.bit_length() - 1
"""Binary logarithm of zstd's largest window in bytes; the whole window is in memory."""


class Line(NamedTuple):
    """One record of a file.

    Attributes:
        place: The record's position, for messages, such as ``"runs.jsonl, line 3"``.
        value: The JSON value.
        is_changed: True if lone surrogates were replaced, or integers beyond 64 bits were turned into text.
    """

    place: str
    value: Json
    is_changed: bool = False


def read_lines(path: Path) -> Iterator[Line]:
    """Read the records of a file in order: one per line, or a single document that spans several lines.

    An array in the first line, or as the document, gives one record per item.

    Raises:
        DatasetError: The file cannot be read, is not JSON, is truncated, or has a record that is too large.
    """
    with opened(path) as file:
        texts = ((number, text) for number, text in enumerate(_texts(path, file), start=1) if text.strip())
        number, text = next(texts, (1, b""))
        if not text:
            return
        place = f"{path}, line {number}"
        try:
            value = decoded(text)
        except ValueError as error:
            line = _document(path, text, (more for _, more in texts), error)
            yield from _items(line)
            return
        yield from _items(line_of(place, value))
        for number, text in texts:
            place = f"{path}, line {number}"
            try:
                value = decoded(text)
            except ValueError as error:
                raise _no_json(place, error) from error
            yield line_of(place, value)


def first_record(path: Path) -> Json:
    """Return the first record of a file, which shows the file's format.

    Raises:
        DatasetError: The file holds no record, or :func:`read_lines` cannot read it.
    """
    for line in read_lines(path):
        return line.value
    raise DatasetError(f"{path} holds no record; name a file of runs")


def _texts(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    while text := file.readline(MAX_RECORD + 1):
        if len(text) > MAX_RECORD:
            _refuse_size(path, "a line")
        yield text


def _document(path: Path, start: bytes, rest: Iterator[bytes], error: ValueError) -> Line:
    """Read a document that spans several lines; ``error`` is the error of decoding its first line alone."""
    parts, size = [start], len(start)
    for part in rest:
        parts.append(part)
        size += len(part)
        if size > MAX_RECORD:
            _refuse_size(path, "a document that spans lines")
    if len(parts) == 1:
        raise _no_json(f"{path}, line 1", error)
    try:
        return line_of(str(path), decoded(b"".join(parts)))
    except ValueError as found:
        is_document = start.strip() in (b"{", b"[")
        raise _no_json(str(path) if is_document else f"{path}, line 1", found if is_document else error) from found


def _items(line: Line) -> Iterator[Line]:
    value: Any = line.value
    if not isinstance(value, list):
        yield line
        return
    for number, item in enumerate(as_list(line.value), start=1):
        yield Line(f"{line.place}, item {number}", item, line.is_changed)


def line_of(place: str, value: Json) -> Line:
    """Make a record, replacing values that a store cannot hold (see :func:`storable`)."""
    try:
        msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return Line(place, storable(value), is_changed=True)
    return Line(place, value)


def decoded(text: bytes) -> Json:
    """Decode JSON, accepting the lone surrogates that JavaScript writes; raises :class:`ValueError` if invalid."""
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        return json.loads(text.decode(), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _no_json(place: str, error: ValueError) -> DatasetError:
    reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
    return DatasetError(
        f"{place} is not JSON ({reason}), and nothing was imported; the file may be cut, or still be written: repair "
        "or remove the line, or import the file once it is complete"
    )


def _refuse_size(path: Path, what: str) -> NoReturn:
    raise DatasetError(
        f"{path} has {what} of more than {MAX_RECORD >> 20} MiB, and nothing was imported; write one record a line, "
        "each with one run or one batch of spans"
    )


@contextmanager
def opened(path: Path) -> Generator[IO[bytes]]:
    """Open a file, decompressing gzip and zstd up to a limit; read errors become a :class:`DatasetError`."""
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would wait for its writer
            raise DatasetError(f"{path} is not a file; name a file of runs, or a folder of such files")
        with path.open("rb") as plain:
            start = plain.read(6)
            plain.seek(0)
            if any(start.startswith(magic) for magic in _ZIPS):
                raise DatasetError(
                    f"{path} is an archive, of which only gzip and zstd are read; unpack it and import its files"
                )
            if start.startswith(_GZIP):
                with gzip.open(plain) as packed:
                    yield cast("IO[bytes]", _Bounded(path, cast("IO[bytes]", packed)))
            elif start.startswith(ZSTD):
                with unpacking(str(path), plain) as packed:
                    yield cast("IO[bytes]", _Bounded(path, packed))
            else:
                yield plain
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror or error}; correct the path") from error
    except (EOFError, zlib.error) as error:
        raise DatasetError(
            f"{path} is cut or damaged ({error}), and nothing was imported; copy it once more from where it was made"
        ) from error


@contextmanager
def unpacking(place: str, packed: IO[bytes]) -> Generator[IO[bytes]]:
    """Decompress a zstd stream.

    Raises:
        DatasetError: The package for zstd is not installed.
        EOFError: The stream is truncated or damaged.
    """
    try:
        zstd: Any = importlib.import_module("backports.zstd")
    except ImportError as error:
        raise DatasetError(
            f"{place} is compressed with zstd, which takes one more package; install it with "
            "pip install 'agl-data[zstd]', or unpack the file"
        ) from error
    try:
        with zstd.ZstdFile(packed, options={zstd.DecompressionParameter.window_log_max: _WINDOW}) as file:
            yield file
    except zstd.ZstdError as error:
        raise EOFError(str(error)) from error


class _Bounded:
    """Reads a compressed file, and raises DatasetError when its contents grow beyond the limit."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file, self._size = path, file, 0
        self._most = max(FREE, path.stat().st_size * MAX_GROWTH)

    def readline(self, limit: int) -> bytes:
        return self._counted(self._file.readline(limit))

    def read(self, size: int) -> bytes:
        return self._counted(self._file.read(size))

    def _counted(self, data: bytes) -> bytes:
        self._size += len(data)
        if self._size > self._most:
            raise DatasetError(
                f"{self._path} grows to more than {MAX_GROWTH} times its size, and nothing was imported; if it is no "
                "trap, unpack it and import the file inside"
            )
        return data
