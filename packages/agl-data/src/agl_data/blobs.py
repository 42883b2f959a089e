"""Carries the pictures of calls, as blobs, from one store to another."""

from collections.abc import Iterable, Sequence

from agl.contracts import Recording, Store
from agl.schemas import blob_digests

AT_ONCE = 2
"""The number of blobs in memory, and in one request to a store; each may have 20 MB."""


def digests_of(recordings: Iterable[Recording]) -> list[str]:
    """Return the digests of all blobs that calls refer to, each once."""
    spans = (span for recording in recordings for span in recording.spans)
    return list(dict.fromkeys(digest for span in spans for digest in blob_digests(span)))


async def copy_blobs(source: Store, target: Store, digests: Sequence[str]) -> None:
    """Copy blobs to another store; those that the source lacks are left out."""
    for start in range(0, len(digests), AT_ONCE):
        await target.save_blobs(await source.blobs(digests[start : start + AT_ONCE]))
