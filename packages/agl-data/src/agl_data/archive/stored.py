"""Reads rollouts from a store while other processes may remove some of them."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from agl.contracts import Recording, RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Rollout
from agl.stores import read_recordings
from agl_data.archive.layout import Manifest
from agl_inspect.terminal.query import pages

CHUNK = 100
"""The number of rollouts that are read, compared or written at once."""

_SPANS = 2_000
_PAGE = 1_000


async def read_known(store: Store, rollout_ids: Sequence[str]) -> AsyncIterator[Recording]:
    """Read rollouts with all attempts and spans, in order of id; skips rollouts that are removed in the meantime."""
    left = list(rollout_ids)
    while left:
        try:
            query = RolloutQuery(ids=tuple(left), limit=len(left))
            async for recording in read_recordings(store, query, spans="all"):
                left.remove(recording.rollout.rollout_id)
                yield recording
        except NotFoundError as error:
            if error.key not in left:
                raise
            left.remove(error.key)


async def rollouts_there(store: Store, manifest: Manifest) -> AsyncIterator[Rollout]:
    """Yield the store's rollouts of a part's experiment whose ids lie between the part's first and last id."""
    query = RolloutQuery(experiment=manifest.experiment, after=manifest.first[:-1], limit=_PAGE)
    async for rollouts in pages(store, query):
        for rollout in rollouts:
            if rollout.rollout_id > manifest.last:
                return
            if rollout.rollout_id >= manifest.first:
                yield rollout


def chunks(recordings: Iterable[Recording]) -> Iterator[list[Recording]]:
    """Group recordings into lists small enough for one write to a store."""
    chunk: list[Recording] = []
    spans = 0
    for recording in recordings:
        chunk.append(recording)
        spans += len(recording.spans)
        if len(chunk) >= CHUNK or spans >= _SPANS:
            yield chunk
            chunk, spans = [], 0
    if chunk:
        yield chunk
