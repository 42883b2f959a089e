"""Carries the pictures of calls, as blobs, between a store and the files of an archive."""

import asyncio
from collections.abc import Sequence

import msgspec

from agl.contracts import Store
from agl.errors import ConflictError
from agl.schemas import Blob, decode, encode
from agl_data.archive.layout import Folder, damaged
from agl_data.copying import BLOBS_AT_ONCE


async def archive_blobs(store: Store, folder: Folder, digests: Sequence[str]) -> None:
    """Write the blobs that the archive lacks, each to a file of its own."""
    there = set(await asyncio.to_thread(folder.place.names, _path(folder)))
    new = [digest for digest in digests if _name(digest) not in there]
    for start in range(0, len(new), BLOBS_AT_ONCE):
        for blob in await store.blobs(new[start : start + BLOBS_AT_ONCE]):
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
