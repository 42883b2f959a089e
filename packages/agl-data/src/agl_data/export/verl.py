"""Exports each row as a VERL ``AgentLoopOutput``: in JSON lines, or in Parquet if the file name ends in ``.parquet``.

The prompt ends before the first sampled token, and the rest is the response, with the loss mask. The reward is that of
the rollout. ``extra_fields["agl"]`` names the rollout, group, agents and calls of the row.
"""

import importlib
from typing import Any, BinaryIO

from agl.errors import ConfigError
from agl.hints import pip_install
from agl.schemas import Json, to_json
from agl_data.export.rows import ExportedRow, RowMaker
from agl_data.json_values import NO_NUMBERS, LineFile, are_numbers, storable
from agl_inspect.exports import Exported, ExportSetup

_ROWS, _TOKENS = 1000, 4_000_000
"""Rows are written to a Parquet file once this many rows, or this many tokens, are collected."""


class VerlWriter:
    """Writes rows as VERL's ``AgentLoopOutput``."""

    def __init__(self, *, setup: ExportSetup) -> None:
        self._losses, self._maker = setup.losses, RowMaker("verl", setup.losses)
        is_parquet = setup.path is not None and setup.path.suffix == ".parquet"
        self._table = _Table(setup.file) if is_parquet else None
        self._lines = LineFile(setup)

    def write(self, item: Exported) -> int:
        """Write the rows of a rollout; returns their number."""
        count = 0
        for row in self._maker.rows(item):
            count += 1
            self._write(agent_loop_output(row), item.recording.rollout.rollout_id)
        return count

    def _write(self, output: dict[str, Any], rollout_id: str) -> None:
        if self._table is not None:
            self._table.add(output)
            return
        if not are_numbers(output["response_logprobs"]):
            self._losses.add(NO_NUMBERS, rollout_id)
            del output["response_logprobs"]
        self._lines.write(output, rollout_id)

    def close(self) -> None:
        """Complete a Parquet file; raises :class:`agl.errors.ConfigError` if all calls had texts but no token ids."""
        self._maker.check()
        if self._table is not None:
            self._table.close()


def agent_loop_output(row: ExportedRow) -> dict[str, Json]:
    """Return the fields of VERL's ``AgentLoopOutput`` for a row."""
    start = row.mask.index(1)
    return {
        "prompt_ids": row.ids[:start],
        "response_ids": row.ids[start:],
        "response_mask": row.mask[start:],
        "response_logprobs": row.logprobs[start:],
        "reward_score": row.about.get("reward"),
        "num_turns": row.turns,
        "metrics": {"generate_sequences": row.latency_s},
        "extra_fields": {"agl": row.about},
    }


class _Table:
    """Writes outputs of agent loops as rows of a Parquet file; ``extra_fields`` is JSON text, as its fields vary.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, file: BinaryIO) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                "a Parquet file takes one more package, an --output that ends in .jsonl takes none; run: "
                f"{pip_install('agl-data[parquet]')}"
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
        """Write the remaining rows and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._tokens = [], 0
