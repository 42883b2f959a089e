"""Exports rows for Tinker: each row becomes one datum, whose targets are the input tokens shifted by one.

A line is an object with ``datum``, and with ``agl`` for the rewards, group and agents, which a datum cannot hold. The
datum's ``loss_fn_inputs`` are ``target_tokens``, ``weights`` (the loss mask) and ``logprobs``; the trainer adds the
advantages.
"""

from agl.schemas import Json
from agl_data.export.rows import ExportedRow, RowMaker
from agl_data.json_values import NO_NUMBERS, LineFile, are_numbers
from agl_inspect.exports import Exported, ExportSetup

_PICTURES = "rows with pictures: left out"


class TinkerWriter:
    """Writes rows as datums."""

    reads_blobs = True

    def __init__(self, *, setup: ExportSetup) -> None:
        self._losses, self._lines = setup.losses, LineFile(setup)
        self._maker = RowMaker("tinker", setup.losses)

    def write(self, item: Exported) -> int:
        """Write the rows of a rollout; returns their number."""
        count, rollout_id = 0, item.recording.rollout.rollout_id
        for row in self._maker.rows(item):
            if row.pictures:
                self._losses.add(_PICTURES, rollout_id)
                continue
            count += 1
            made = datum(row)
            if not are_numbers(row.logprobs):
                self._losses.add(NO_NUMBERS, rollout_id)
                del made["loss_fn_inputs"]["logprobs"]
            self._lines.write({"datum": made, "agl": row.about}, rollout_id)
        return count

    def close(self) -> None:
        """Raise :class:`agl.errors.ConfigError` if no row was written because the calls had no token ids."""
        self._maker.check()


def datum(row: ExportedRow) -> dict[str, Json]:
    """Return a row of T tokens as a datum with T - 1 inputs and T - 1 targets."""
    weights = [float(value) for value in row.mask[1:]]
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": row.ids[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": _tensor(row.ids[1:], "int64"),
            "weights": _tensor(weights, "float32"),
            "logprobs": _tensor(row.logprobs[1:], "float32"),
        },
    }


def _tensor(data: list[int] | list[float], dtype: str) -> dict[str, Json]:
    return {"data": data, "dtype": dtype, "shape": [len(data)]}
