"""VERL's agent loop outputs as a Parquet table, written a part at a time; it needs ``agl-data``."""

import importlib
from typing import Any, BinaryIO

from agl.errors import ConfigError
from agl.schemas import to_json
from agl_data.export.lines import storable

_ROWS, _TOKENS = 1000, 4_000_000
"""The most rows, and about the most tokens, that are kept before they are written."""


class VerlTable:
    """Writes outputs of agent loops as rows; ``extra_fields`` is JSON, because its fields differ.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, file: BinaryIO) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                "a Parquet file takes one more package; install it with pip install 'agl-data[parquet]', or name an "
                "--output that ends in .jsonl"
            ) from error
        arrow = self._arrow
        fields = {
            "prompt_ids": arrow.list_(arrow.int32()),
            "response_ids": arrow.list_(arrow.int32()),
            "response_mask": arrow.list_(arrow.int8()),
            "response_logprobs": arrow.list_(arrow.float32()),
            "reward_score": arrow.float64(),
            "num_turns": arrow.int32(),
            "metrics": arrow.struct({"generate_sequences": arrow.float64()}),
            "extra_fields": arrow.string(),
        }
        self._schema = arrow.schema(list(fields.items()))
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def add(self, output: dict[str, Any]) -> None:
        """Add a row."""
        self._rows.append({**output, "extra_fields": to_json(storable(output["extra_fields"])).decode()})
        self._tokens += len(output["prompt_ids"]) + len(output["response_ids"])
        if len(self._rows) >= _ROWS or self._tokens >= _TOKENS:
            self._flush()

    def close(self) -> None:
        """Write the rest and the table's end."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._tokens = [], 0
