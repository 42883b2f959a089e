"""Chooses the waiting requests that join the batch at the next token boundary, and the tokens to compute for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

    from torch import Tensor

    from agl_algo_torch.kvcache import KeyValues, TokenArray
    from agl_algo_torch.prefixes import PrefixStore
    from agl_algo_torch.sequence import Flight

_WORTH_WAITING = 32
"""A request waits one turn for another one to compute a shared prefix that is at least this many tokens longer."""


@dataclass(slots=True)
class Admission:
    """One distinct prompt with the sequences that start from it.

    Attributes:
        tokens: The prompt, and the tokens that were generated before a weight swap interrupted it.
        shared: The number of tokens that `prefix` holds.
        flights: The sequences that join; they share the computation.
    """

    tokens: TokenArray
    shared: int
    prefix: KeyValues | None
    flights: list[Flight]

    @property
    def new(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) - self.shared


def pick(waiting: deque[Flight], *, rows: int, prefill_tokens: int, prefixes: PrefixStore) -> list[Admission]:
    """Take flights from the left while `rows` and the prefill budget last, and return their distinct prompts.

    A flight stays when another one is about to compute a long prefix of it, or when padding all prompts to the
    longest would exceed `prefill_tokens`. The first prompt is taken however long it is. Flights that stay keep their
    order at the left of `waiting`.
    """
    picked: dict[bytes, Admission] = {}
    kept: list[Flight] = []
    width = 0
    while waiting and rows > 0:
        flight = waiting.popleft()
        tokens = flight.tokens()
        admission = picked.get(tokens.tobytes()) or _admission(tokens, picked, prefixes)
        if admission is None:
            kept.append(flight)
            continue
        width = max(width, admission.new)
        # A second flight of a prompt that was picked already costs nothing.
        if picked and not admission.flights and (len(picked) + 1) * width > prefill_tokens:
            kept.append(flight)
            break
        picked[tokens.tobytes()] = admission
        admission.flights.append(flight)
        flight.cached_tokens = admission.shared
        rows -= 1
    waiting.extendleft(reversed(kept))
    return list(picked.values())


def _admission(tokens: TokenArray, picked: dict[bytes, Admission], prefixes: PrefixStore) -> Admission | None:
    """Return the admission of a prompt not seen in this turn, or None if another one is about to compute its prefix."""
    shared, prefix = prefixes.find(tokens)
    probe = shared + _WORTH_WAITING
    if prefixes.is_on and len(tokens) > probe:
        start = tokens[:probe].tobytes()
        if any(key.startswith(start) for key in picked):
            return None
    return Admission(tokens, shared, prefix, [])


def padded(admissions: Sequence[Admission], width: int) -> tuple[Tensor, Tensor]:
    """Return ids and positions of the tokens after each prompt's prefix, both [rows, width], padded left with 0."""
    ids = torch.zeros((len(admissions), width), dtype=torch.long)
    positions = torch.zeros_like(ids)
    for row, admission in enumerate(admissions):
        ids[row, width - admission.new :] = torch.tensor(admission.tokens[admission.shared :])
        positions[row, width - admission.new :] = torch.arange(admission.shared, len(admission.tokens))
    return ids, positions
