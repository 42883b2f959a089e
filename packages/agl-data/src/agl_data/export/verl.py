"""Exports each row as a VERL ``AgentLoopOutput``: in JSON lines, or in Parquet if the file name ends in ``.parquet``.

The prompt ends before the first sampled token, and the rest is the response, with the loss mask. The reward is that of
the rollout. ``extra_fields["agl"]`` names the rollout, group, agents and calls of the row. Pictures are data URLs in
``multi_modal_data``; VERL's processor makes its tensors of them.
"""

from typing import Any

from agl.schemas import Json, to_json
from agl_data.export.rows import ExportedRow, RowMaker
from agl_data.export.tables import Table
from agl_data.json_values import NO_NUMBERS, LineFile, are_numbers, storable
from agl_inspect.exports import Exported, ExportSetup


class VerlWriter:
    """Writes rows as VERL's ``AgentLoopOutput``."""

    reads_blobs = True

    def __init__(self, *, setup: ExportSetup) -> None:
        self._losses, self._maker = setup.losses, RowMaker("verl", setup.losses)
        is_parquet = setup.path is not None and setup.path.suffix == ".parquet"
        self._table = Table(setup.file, _schema) if is_parquet else None
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
            extra = to_json(storable(output["extra_fields"])).decode()
            size = 4 * (len(output["prompt_ids"]) + len(output["response_ids"])) + len(extra)
            images = output.get("multi_modal_data", {"images": ()})["images"]
            self._table.add({**output, "extra_fields": extra}, size=size + sum(map(len, images)))
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
        **({"multi_modal_data": {"images": row.pictures}} if row.pictures else {}),
        "reward_score": row.about.get("reward"),
        "num_turns": row.turns,
        "metrics": {"generate_sequences": row.latency_s},
        "extra_fields": {"agl": row.about},
    }


def _schema(arrow: Any) -> Any:
    """Return the columns of the Parquet file; ``extra_fields`` is JSON text, as its fields vary."""
    fields = {
        "prompt_ids": arrow.list_(arrow.int32()),
        "response_ids": arrow.list_(arrow.int32()),
        "response_mask": arrow.list_(arrow.int8()),
        "response_logprobs": arrow.list_(arrow.float32()),
        "multi_modal_data": arrow.struct({"images": arrow.list_(arrow.string())}),
        "reward_score": arrow.float64(),
        "num_turns": arrow.int32(),
        "metrics": arrow.struct({"generate_sequences": arrow.float64()}),
        "extra_fields": arrow.string(),
    }
    return arrow.schema(list(fields.items()))
