"""Soft overlong punishment of DAPO: long answers lose reward before they reach the limit at which they are cut.

Yu et al. 2025 (arXiv 2503.14476), equation 13. With L tokens in an answer, L_max = `limit` and L_cache = `buffer`

    0                                   where L <= L_max - L_cache
    ((L_max - L_cache) - L) / L_cache   where L_max - L_cache < L <= L_max
    -1                                  where L > L_max

An answer is a call here, and the punishment is added to what credit gave that call: no other call pays for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agl.schemas import CallCredit, Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftOverlong:
    """The punishment for calls with more than `limit - buffer` tokens; a `limit` of 0 turns it off."""

    limit: int = 0
    buffer: int = 0

    def check(self, algorithm: str) -> None:
        """Raise ConfigError for lengths that do not go together."""
        if (self.limit or self.buffer) and not 0 < self.buffer <= self.limit:
            raise ConfigError(
                f"{algorithm} got overlong_limit = {self.limit} and overlong_buffer = {self.buffer}; give the most "
                "tokens of an answer and the part of them, at least 1, in which it is punished, or neither."
            )

    def punishment(self, tokens: int) -> float:
        """Return what an answer of so many tokens loses, from -1 to 0."""
        if not self.limit:
            return 0.0
        free = self.limit - self.buffer
        return max(-1.0, min(0.0, (free - tokens) / self.buffer))

    def applied(self, episode: Episode, credits: Sequence[CallCredit]) -> list[CallCredit]:
        """Return the calls' credit less the punishment for their lengths."""
        tokens = {call.span_id: len(call.response_ids) // 4 for call in episode.transitions}  # packed int32
        return [
            msgspec.structs.replace(credit, value=credit.value + self.punishment(tokens[credit.span_id]))
            for credit in credits
        ]
