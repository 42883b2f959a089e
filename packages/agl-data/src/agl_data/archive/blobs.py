"""Carries the pictures of calls, as blobs, between stores, and between a store and the files of an archive."""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from agl.contracts import Recording, Store
from agl.errors import ConflictError
from agl.schemas import Blob, blob_digests, decode, encode
from agl_data.archive.layout import Folder, damaged

_AT_ONCE = 2
"""The number of blobs in memory, and in one request to a store; each may have 20 MB."""


def digests_of(recordings: Iterable[Recording]) -> list[str]:
    """Return the digests of all blobs that calls refer to, each once."""
    spans = (span for recording in recordings for span in recording.spans)
    return list(dict.fromkeys(digest for span in spans for digest in blob_digests(span)))


async def copy_blobs(source: Store, target: Store, digests: Sequence[str]) -> None:
    """Copy blobs to another store; those that the source lacks are left out."""
    for start in range(0, len(digests), _AT_ONCE):
        await target.save_blobs(await source.blobs(digests[start : start + _AT_ONCE]))


async def archive_blobs(store: Store, folder: Folder, digests: Sequence[str]) -> None:
    """Write the blobs that the archive lacks, each to a file of its own."""
    there = set(await asyncio.to_thread(folder.place.names, _path(folder)))
    new = [digest for digest in digests if _name(digest) not in there]
    for start in range(0, len(new), _AT_ONCE):
        for blob in await store.blobs(new[start : start + _AT_ONCE]):
            await asyncio.to_thread(folder.place.write, _path(folder, blob.digest), encode(blob))


async def restore_blobs(folder: Folder, store: Store, digests: Sequence[str]) -> None:
    """Save the archived blobs in the store; raises :class:`StoreError` for a file that is damaged."""
    there = set(await asyncio.to_thread(folder.place.names, _path(folder)))
    for digest in digests:
        if _name(digest) in there:
            path = _path(folder, digest)
            data = await asyncio.to_thread(folder.place.read, path)
            try:
                await store.save_blobs([decode(data or b"", Blob)])
            except (msgspec.DecodeError, ConflictError) as error:
                raise damaged(folder.place, path, str(error)) from error


def _name(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _path(folder: Folder, digest: str = "") -> str:
    return f"{folder.name}/blobs/{_name(digest)}".rstrip("/")
