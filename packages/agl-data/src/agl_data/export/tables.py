"""Writes records to a Parquet file in groups, with few of them in memory."""

import importlib
from collections.abc import Callable
from typing import Any, BinaryIO

from agl.errors import ConfigError
from agl.hints import pip_install

_ROWS, _BYTES = 1000, 16 << 20
"""Records are written once this many, or this many bytes, are collected."""


class Table:
    """The Parquet file of an export.

    Args:
        file: The open file.
        schema_of: Makes the file's schema with pyarrow, which it gets.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, file: BinaryIO, schema_of: Callable[[Any], Any]) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                f"a Parquet file takes one more package; run: {pip_install('agl-data[parquet]')}"
            ) from error
        self._schema = schema_of(self._arrow)
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, row: dict[str, Any], *, size: int) -> None:
        """Add a record of about ``size`` bytes."""
        self._rows.append(row)
        self._bytes += size
        if len(self._rows) >= _ROWS or self._bytes >= _BYTES:
            self._flush()

    def close(self) -> None:
        """Write the remaining records and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._bytes = [], 0
