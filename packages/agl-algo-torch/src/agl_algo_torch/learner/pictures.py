"""Gives rows the pictures that their placeholder tokens stand for, and passes them to a model.

A recorded call names its pictures by digest; their bytes are in the store. The model's modality (`agl.contracts`) turns
bytes into tensors and positions. Everything here works for any family of models: the tensors keep the names that the
family's processor gives them.

A call is refused, with a reason that `agl why` shows, if training on it could break a pass or teach nonsense: its
pictures are not in the store, its prompt has other placeholders than its pictures need, or its answer has a token that
stands for a picture.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from agl.episodes import make_rows
from agl.schemas import unpack_ids
from agl_algo_torch.learner.typed_torch import integers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from agl.contracts import Modality, Store
    from agl.schemas import Blob, Episode, MediaSpan, Transition

_AT_ONCE = 64
"""Pictures of one request to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPictures:
    """The pictures of one row, a span and a blob for each, and the modality that reads them."""

    spans: tuple[MediaSpan, ...]
    blobs: tuple[Blob, ...]
    modality: Modality


class Pictures:
    """The pictures of a step's rollouts, for one model in training."""

    def __init__(self, modality: Modality) -> None:
        self.modality = modality
        self._blobs: dict[str, Blob] = {}

    async def ready(self, store: Store, episodes: Sequence[Episode]) -> list[Episode]:
        """Read the pictures of episodes from the store, and return the episodes without calls that cannot train."""
        calls = [call for episode in episodes for call in episode.transitions]
        spans = [span for call in calls if call.reject in ("", "not_selected") for span in call.media]
        await self.read(store, spans)
        return await asyncio.to_thread(lambda: [self._checked(episode) for episode in episodes])

    async def read(self, store: Store, spans: Sequence[MediaSpan]) -> None:
        """Read the pictures of spans from the store; those that it no longer has stay away."""
        missing = sorted({span.digest for span in spans} - self._blobs.keys())
        for start in range(0, len(missing), _AT_ONCE):
            found = await store.blobs(missing[start : start + _AT_ONCE])
            self._blobs |= {blob.digest: blob for blob in found}

    def of(self, spans: Sequence[MediaSpan]) -> RowPictures | None:
        """Return the pictures of a row with these spans; None without spans, or if a picture is not there."""
        blobs = [self._blobs[span.digest] for span in spans if span.digest in self._blobs]
        if not spans or len(blobs) < len(spans):
            return None
        return RowPictures(spans=tuple(spans), blobs=tuple(blobs), modality=self.modality)

    def forget(self) -> None:
        """Drop the pictures at the end of a step; rows that are trained again hold theirs."""
        self._blobs.clear()

    def _checked(self, episode: Episode) -> Episode:
        calls = [call for call in episode.transitions if not call.reject]
        problems = {call.span_id: problem for call in calls if (problem := self._problem(call))}
        if not problems:
            return episode
        transitions = tuple(
            replace(call, reject="non_token_input", detail=problems[call.span_id], branch=-1, start=-1)
            if call.span_id in problems
            else call
            for call in episode.transitions
        )
        rows = make_rows(transitions, group_id=episode.rollout.group_id)
        return replace(episode, transitions=transitions, rows=rows)

    def _problem(self, call: Transition) -> str:
        """Return why a call cannot train; `""` if it can."""
        if sampled := self.modality.banned.intersection(unpack_ids(call.response_ids)):
            return f"the answer has the token {min(sampled)}, which stands for a picture and must not be sampled"
        if gone := [span.digest for span in call.media if span.digest not in self._blobs]:
            return f"the store no longer has the picture {gone[0]}"
        blobs = [self._blobs[span.digest] for span in call.media]
        try:
            found = self.modality.spans(unpack_ids(call.prompt_ids), blobs)
        except ValueError as error:
            return str(error)
        return "" if found == call.media else "the recorded places of the pictures are not those in the prompt"


def expanded(
    ids: Sequence[int], mask: Sequence[int], blobs: Sequence[Blob], modality: Modality
) -> tuple[list[int], list[int], RowPictures | None]:
    """Replace the placeholder of each picture by all of its tokens; returns ids, mask and pictures of the row.

    Tokens of pictures get the mask 0. Raises ValueError as `Modality.expand` does.
    """
    whole, spans = modality.expand(ids, blobs)
    if not spans:
        return whole, list(mask), None
    placeholder, left = whole[spans[0].offset], list(blobs)
    grown: list[int] = []
    for value, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1)):
        part = [token for token, _ in run]
        own, left = left[: part.count(placeholder)], left[part.count(placeholder) :]
        tokens, _ = modality.expand(part, own)
        grown += [value and int(token not in modality.banned) for token in tokens]
    return whole, grown, RowPictures(spans=spans, blobs=tuple(blobs), modality=modality)


def picture_inputs(rows: Sequence[RowPictures | None], ids: Sequence[Tensor], *, is_packed: bool) -> dict[str, Any]:
    """Return a model's inputs for the pictures of a pass, `{}` without any; `ids` has the tokens of each row, [T].

    Every row has positions of its own, so a pass may mix rows with and without pictures, packed or padded.
    """
    found = [row for row in rows if row is not None]
    if not found:
        return {}
    modality, device = found[0].modality, ids[0].device
    spans = [span for row in found for span in row.spans]
    features = modality.features([blob for row in found for blob in row.blobs], spans)
    inputs: dict[str, Any] = {name: tensor.to(device) for name, tensor in features.items()}
    positions = [
        modality.positions(integers(own), () if row is None else row.spans) for own, row in zip(ids, rows, strict=True)
    ]
    if positions[0] is None:
        return inputs
    if is_packed:
        joined = torch.cat(positions, dim=1)[:, None]  # [3, 1, N]
    else:
        padded = torch.nn.utils.rnn.pad_sequence([each.T for each in positions], batch_first=True)  # [B, T, 3]
        joined = padded.permute(2, 0, 1)
    return inputs | {"position_ids": joined.to(device)}
