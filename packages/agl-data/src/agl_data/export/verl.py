"""VERL: each row is one ``AgentLoopOutput``, as JSON lines, or as Parquet where the file's name ends in ``.parquet``.

The prompt ends where the first token was sampled; everything behind it is the response, with a mask. Its reward is
the rollout's. ``extra_fields["agl"]`` says which rollout, group, agents and calls a row belongs to.
"""

from typing import Any

from agl.schemas import Json
from agl_data.export.lines import NO_NUMBERS, LineFile, are_numbers
from agl_data.export.parquet import VerlTable
from agl_data.export.rows import ExportedRow, RowMaker
from agl_inspect.exports import Exported, ExportSetup


class VerlWriter:
    """Writes rows as outputs of VERL's agent loops."""

    def __init__(self, *, setup: ExportSetup) -> None:
        self._losses, self._maker = setup.losses, RowMaker("verl", setup.losses)
        is_parquet = setup.path is not None and setup.path.suffix == ".parquet"
        self._table = VerlTable(setup.file) if is_parquet else None
        self._lines = LineFile(setup)

    def write(self, item: Exported) -> int:
        """Write the rows of a rollout."""
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
        """Complete a Parquet file; raises :class:`agl.errors.ConfigError` if there were texts only."""
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
