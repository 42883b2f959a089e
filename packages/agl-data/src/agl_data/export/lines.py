"""JSON lines of any recorded value: what JSON cannot carry is replaced and counted."""

import math
from typing import Any

from agl.schemas import Json, to_json
from agl_data.json_values import CHANGED, storable
from agl_inspect.exports import ExportSetup

NO_NUMBERS = "calls with log-probabilities that JSON has no numbers for (NaN, infinities): without any"


class LineFile:
    """Writes one JSON value a line."""

    def __init__(self, setup: ExportSetup) -> None:
        self._file, self._losses = setup.file, setup.losses

    def write(self, value: Json, rollout_id: str) -> None:
        """Write a value of a rollout."""
        try:
            line = to_json(value)
        except (UnicodeEncodeError, OverflowError):
            self._losses.add(CHANGED, rollout_id)
            line = to_json(storable(value))
        self._file.write(line + b"\n")


def are_numbers(values: list[float]) -> bool:
    """Return true if all of the values are finite."""
    return all(map(math.isfinite, values))


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that say something: those that are ``None`` or empty are left out."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {}, ())}
