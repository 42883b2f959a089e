"""Pictures go into an archive and to another store with the rollouts whose calls saw them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agl.contracts import Store
from agl.errors import StoreError
from agl.schemas import Blob, MediaSpan
from agl.stores import MemoryStore
from agl_store_sqlite import SQLiteStore
from agl_testing.commands import invoke_agl
from agl_testing.stores.samples import make_blob, make_call, make_rollout, make_span, outcome_of, start_one

from .conftest import archive, restore

ONE, TWO, SEEN, OTHER = map(make_blob, ("one", "two", "seen", "other"))
DIGESTS = [ONE.digest, TWO.digest]


async def with_pictures() -> MemoryStore:
    """Return a store with two rollouts that saw three pictures, one in no span, and a picture that no call saw."""
    store = MemoryStore()
    await fill(store, ONE, TWO, SEEN, OTHER)
    return store


async def fill(store: Store, *blobs: Blob) -> None:
    await store.save_blobs(blobs)
    for _ in range(2):
        claim = await start_one(store, make_rollout(experiment="sums"))
        media = [MediaSpan(offset=at, length=1, modality="image", digest=each) for at, each in enumerate(DIGESTS)]
        call = replace(
            make_call(range(9), range(3)), media=tuple(media), inputs=(SEEN.digest, "https://example.com/a.png")
        )
        await store.finish([outcome_of(claim, spans=[make_span(claim, call=call)])])


async def test_archive_holds_each_picture_once_and_restores_it(url: str) -> None:
    store, other = await with_pictures(), MemoryStore()
    await archive(store, url)
    await restore(other, url)
    assert [ONE, TWO, SEEN] == await other.blobs([*DIGESTS, SEEN.digest, OTHER.digest])


async def test_damaged_picture_in_an_archive_is_named(tmp_path: Path) -> None:
    await archive(await with_pictures(), str(tmp_path / "a"))
    path = next(tmp_path.glob(f"a/*/blobs/{TWO.digest[7:]}"))
    path.write_bytes(next(tmp_path.glob(f"a/*/blobs/{ONE.digest[7:]}")).read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match=TWO.digest[7:]):
        await restore(MemoryStore(), str(tmp_path / "a"))


def test_copy_leaves_out_pictures_that_the_source_lacks(tmp_path: Path) -> None:
    asyncio.run(used(tmp_path / "from.db", lambda store: fill(store, ONE, SEEN, OTHER)))
    invoke_agl("data", "copy", "from.db", "to.db", folder=tmp_path)
    digests = [*DIGESTS, SEEN.digest, OTHER.digest]
    assert [ONE, SEEN] == asyncio.run(used(tmp_path / "to.db", lambda store: store.blobs(digests)))


async def used(path: Path, use: Callable[[Store], Awaitable[Any]]) -> Any:
    store = SQLiteStore(f"sqlite:///{path}")
    try:
        return await use(store)
    finally:
        await store.close()
