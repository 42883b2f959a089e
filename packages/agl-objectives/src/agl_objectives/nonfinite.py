"""Counts the updates that an engine left out because their gradient was not finite, and ends a run beyond a limit.

One NaN would enter the moments of AdamW and every weight, and never leave them again. One such gradient is an accident;
several in a row say that training is broken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agl.errors import AglError

__all__ = ["MAX_NONFINITE", "Skipped"]

MAX_NONFINITE = 3
"""Updates in a row that may be skipped, unless a setting says otherwise."""


@dataclass(slots=True)
class Skipped:
    """The updates of one model that were not made; at most `limit` in a row may be."""

    limit: int
    total: int = 0
    in_a_row: int = 0
    told: int = 0

    def news(self) -> str:
        """Return a sentence for people about the updates that were skipped since the last call, `""` without one."""
        count, self.told = self.total - self.told, self.total
        return f"{count} updates were skipped, because their gradients are not finite" if count else ""

    def note(self, norm: float, *, update: int) -> bool:
        """Take the gradient's norm of an update and return whether it was skipped.

        Raises AglError beyond the limit.
        """
        if math.isfinite(norm):
            self.in_a_row = 0
            return False
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            raise AglError(
                f"The gradient norm of update {update} is {norm}: {self.in_a_row} in a row are not finite, and "
                f"max_nonfinite = {self.limit}. None of these updates was made. Lower lr, train in float32 instead of "
                "float16, or raise max_nonfinite."
            )
        return True
