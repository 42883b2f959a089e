"""Stores the entropy and the advantage of every token of a step, for `agl why` and the console.

The update computes both anyway; storing them costs a copy to the CPU. If a step has several passes over a token, the
numbers of the first pass count, because its policy is closest to the one that sampled the token.
T is the length of a row, M the number of trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from agl_algo_torch.learner.typed_torch import half_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from agl.contracts import CallUse
    from agl.schemas import Segment
    from agl_algo_torch.learner.batch import MicroBatch, RowSample

ENTROPY, ADVANTAGE = "entropy", "advantage"
"""Keys of the numbers in `CallUse.tokens`."""


class TokenNumbers:
    """Collects entropy and advantage of every token of a step's calls, in half precision, by rollout and call."""

    def __init__(self) -> None:
        self._found: defaultdict[tuple[str, str], dict[str, bytes]] = defaultdict(dict[str, bytes])

    def note_entropies(self, batch: MicroBatch, entropy_M: Tensor) -> None:
        """Store the entropies of a micro-batch's trained tokens, except for calls that have entropies already."""
        self._note_batch(ENTROPY, batch, entropy_M)

    def note_gaps(self, batch: MicroBatch, gap_M: Tensor) -> None:
        """Store by how much the teacher prefers each token as its advantage, except for calls that have advantages."""
        self._note_batch(ADVANTAGE, batch, gap_M)

    def note_advantages(self, samples: Iterable[RowSample]) -> None:
        """Store the advantages of the calls in which the advantage differs from token to token."""
        for sample in samples:
            chosen = sample.trained
            for part in sample.parts:
                own_R = slice(part.start, part.stop)
                values = sample.advantages[own_R][chosen[own_R]]
                if len(values) and bool((values != values[0]).any()):
                    self._note(ADVANTAGE, sample, part, sample.advantages)

    def added(self, uses: Mapping[str, tuple[CallUse, ...]]) -> dict[str, tuple[CallUse, ...]]:
        """Return `uses`, which is by rollout id, with the stored numbers of the calls' tokens added."""
        return {
            rollout: tuple(replace(use, tokens=self._found.get((rollout, use.span_id), {})) for use in calls)
            for rollout, calls in uses.items()
        }

    def _note_batch(self, name: str, batch: MicroBatch, values_M: Tensor) -> None:
        if all(name in self._found[s.rollout, part.span_id] for s in batch.samples for part in s.parts):
            return  # a later pass over the same tokens: nothing to copy from the device
        for sample, values_T in zip(batch.samples, batch.scatter(values_M.float()).values(), strict=True):
            for part in sample.parts:
                if name not in self._found[sample.rollout, part.span_id]:
                    self._note(name, sample, part, values_T)

    def _note(self, name: str, sample: RowSample, part: Segment, values_T: Tensor) -> None:
        own_R = slice(part.start, part.stop)
        known_R = values_T[own_R].float().where(sample.trained[own_R], torch.nan)
        self._found[sample.rollout, part.span_id][name] = half_bytes(known_R)


def mean_advantages(samples: Iterable[RowSample]) -> defaultdict[str, dict[str, float]]:
    """Return the mean advantage of each call's trained tokens, by rollout id and span id."""
    means: defaultdict[str, dict[str, float]] = defaultdict(dict[str, float])
    for sample in samples:
        for part in sample.parts:
            own_R = slice(part.start, part.stop)
            chosen_R = sample.trained[own_R]
            if bool(chosen_R.any()):
                means[sample.rollout][part.span_id] = float(sample.advantages[own_R][chosen_R].mean())
    return means
