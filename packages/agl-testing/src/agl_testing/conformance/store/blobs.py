"""Tests of the payloads that model calls refer to, such as pictures."""

# ruff: noqa: D102  # the names of the tests say what holds

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import ClassVar

import pytest
from msgspec.structs import replace

from agl.contracts import MAX_BLOB_BYTES, RolloutQuery, Store
from agl.errors import ConflictError, StoreError
from agl.schemas import Blob, MediaSpan, Rollout, Span
from agl_testing.conformance._base import require, run
from agl_testing.conformance.store.case import opened, store_test
from agl_testing.stores import process
from agl_testing.stores.process import StoreLocation
from agl_testing.stores.samples import make_blob, make_call, make_span, outcome_of, start_one


def _digests(blobs: Sequence[Blob]) -> list[str]:
    return [blob.digest for blob in blobs]


async def _finish_with(store: Store, *blobs: Blob, has_spans: bool = True) -> Rollout:
    """Run a rollout whose only call saw these pictures; ``has_spans`` is false for a model that does not train."""
    claim = await start_one(store)
    media = [
        MediaSpan(offset=2 * at, length=2, modality="image", digest=blob.digest, grid=(1, 2, 2))
        for at, blob in enumerate(blobs)
    ]
    call = replace(make_call(range(20), range(9)), inputs=tuple(_digests(blobs)))
    if has_spans:
        call = replace(call, media=tuple(media), processor="P 1 0a")
    (done,) = await store.finish([outcome_of(claim, spans=[make_span(claim, call=call)])])
    return done


class BlobTests:
    """Tests of saving, reading and removing blobs."""

    is_in_process: ClassVar[bool] = True
    """True if the store's operations run in this process, so that a test can shorten the time for which blobs stay."""

    @store_test
    async def test_blobs_come_back_in_the_order_asked_without_those_that_are_missing(self, store: Store) -> None:
        one, two = make_blob("one"), make_blob("two")
        await store.save_blobs([one, two, one])
        await store.save_blobs([two])
        assert [two, one, two] == await store.blobs([two.digest, make_blob("none").digest, one.digest, two.digest])
        assert [] == await store.blobs([])

    @store_test
    async def test_blob_with_the_digest_of_other_data_is_refused(self, store: Store) -> None:
        good, bad = make_blob("good"), replace(make_blob("a"), data=b"b")
        with pytest.raises(ConflictError, match="digest"):
            await store.save_blobs([good, bad])
        assert [] == await store.blobs([good.digest, bad.digest])

    @store_test
    async def test_blob_above_the_limit_is_refused(self, store: Store) -> None:
        large = make_blob("x" * (MAX_BLOB_BYTES + 1))
        with pytest.raises(StoreError, match="20,000,001 bytes"):
            await store.save_blobs([large])
        assert [] == await store.blobs([large.digest])

    @store_test
    async def test_media_of_a_call_come_back(self, store: Store) -> None:
        done = await _finish_with(store, make_blob("one"), make_blob("two"))
        (span,) = await store.spans(done.rollout_id)
        assert [(0, 2, make_blob("one").digest), (2, 2, make_blob("two").digest)] == _places(span)

    @store_test
    async def test_delete_leaves_blobs_that_were_saved_lately(self, store: Store) -> None:
        blob = make_blob("recent")
        await store.save_blobs([blob])
        done = await _finish_with(store, blob)
        await store.delete([done.rollout_id])
        assert [blob] == await store.blobs([blob.digest])

    def test_delete_removes_a_blob_with_its_last_rollout(self, location: StoreLocation) -> None:
        require(self.is_in_process, "is_in_process", "store")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agl.stores._blobs.SAVED_S", -1e9)
            run(_delete_one_by_one(location))

    def test_blob_that_no_span_ever_named_is_removed(self, location: StoreLocation) -> None:
        require(self.is_in_process, "is_in_process", "store")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agl.stores._blobs.SAVED_S", -1e9)
            patch.setattr("agl.stores._blobs.CHECKED", 2)
            run(_delete_another(location))

    def test_blob_that_two_processes_save_at_once_is_whole(self, location: StoreLocation) -> None:
        require(getattr(self, "is_shared", False), "is_shared", "store")
        command = [sys.executable, "-m", process.__name__, location.factory, location.url, os.devnull, "save"]
        savers = [subprocess.Popen(command) for _ in range(2)]
        assert [0, 0] == [saver.wait() for saver in savers]
        assert process.BLOBS == run(_read(location, _digests(process.BLOBS)))


def _places(span: Span) -> list[tuple[int, int, str]]:
    assert span.call is not None
    return [(each.offset, each.length, each.digest) for each in span.call.media]


async def _delete_one_by_one(location: StoreLocation) -> None:
    own, shared = make_blob("own"), make_blob("shared")
    async with opened(location) as store:
        await store.save_blobs([own, shared])
        first, second = await _finish_with(store, own, shared), await _finish_with(store, shared, has_spans=False)
        await store.delete([first.rollout_id])
        assert [shared] == await store.blobs(_digests([own, shared]))
        await store.delete([second.rollout_id])
        assert [] == await store.blobs(_digests([own, shared]))
        assert [] == await store.rollouts(RolloutQuery())


async def _delete_another(location: StoreLocation) -> None:
    orphans = [make_blob(f"orphan {at}") for at in range(5)]
    async with opened(location) as store:
        await store.save_blobs(orphans)
        done = await _finish_with(store, make_blob("never saved"))
        await store.delete([done.rollout_id])
        assert [] == await store.blobs(_digests(orphans))


async def _read(location: StoreLocation, digests: Sequence[str]) -> list[Blob]:
    async with opened(location) as store:
        return await store.blobs(digests)
