"""Tries out how long updates take, on random rows of given lengths, before an experiment has made its first step.

What an update costs depends on the lengths of its rows and on nothing that they say. Weights move while it is measured,
so the learner is one of its own, which is dropped afterwards.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from agl_algo_torch.learner.batch import RowSample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMIT_S = 5.0
"""Seconds that a measurement may take, about."""

_FEW = 4
_FEWEST_TOKENS = 2


def update_seconds(
    update: Callable[[Sequence[RowSample]], object], rows: Sequence[tuple[int, int]], *, vocabulary: int
) -> float:
    """Return the seconds of `update` on rows of so many tokens, of which so many train.

    A first update of a few rows is not counted: torch allocates and chooses kernels in it. Its time says how many rows
    can be tried out; where that is not all of them, the seconds of the others follow from their tokens.
    """
    made = [random_row(number, tokens, trained, vocabulary) for number, (tokens, trained) in enumerate(rows)]
    _timed(update, made[:_FEW])
    few = _timed(update, made[:_FEW])
    tried = made[: max(_FEW, min(len(made), round(_FEW * LIMIT_S / max(few, 1e-9))))]
    seconds = few if len(tried) <= _FEW else min(_timed(update, tried) for _ in range(1 + (few * len(tried) < 1)))
    return seconds * sum(len(row.ids) for row in made) / sum(len(row.ids) for row in tried)


def _timed(update: Callable[[Sequence[RowSample]], object], rows: Sequence[RowSample]) -> float:
    started = time.perf_counter()
    update(rows)
    return time.perf_counter() - started


def random_row(number: int, tokens: int, trained: int, vocabulary: int) -> RowSample:
    """Return a row of random tokens, the last of which train, with advantages of both signs."""
    draw = torch.Generator().manual_seed(number)
    size = max(_FEWEST_TOKENS, tokens)  # a row's first token is never predicted
    mask_T = torch.zeros(size, dtype=torch.bool)
    mask_T[-min(max(1, trained), size - 1) :] = True
    return RowSample(
        rollout=f"tried-{number}",
        ids=torch.randint(vocabulary, (size,), generator=draw),
        mask=mask_T,
        advantages=mask_T.float() * (1.0 if number % 2 else -1.0),
        behaviour=torch.full((size,), -1.0) * mask_T,
        temperature=torch.ones(size),
    )
