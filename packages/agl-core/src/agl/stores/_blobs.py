"""Blobs as documents: stored once per digest, referred to by rollouts, and removed after their last rollout.

Five kinds of documents carry them: ``blob`` (the payload by digest), ``blob saved`` (the time of the last saving, apart
from the payload so that saving again reads and writes a few bytes), ``blob use`` (one for each digest and rollout),
``pictures`` (a rollout's digests), and ``blob check`` (digests that nobody may refer to, by the time at which that
became possible). Every first saving and every removal of a rollout leave checks. After rollouts were removed,
:func:`loose` and :func:`drop` work through checks, those of removed rollouts first, until :data:`SWEPT` are settled;
later removals go on with the rest. So a removal costs no more, however many blobs were ever saved.
"""

from collections.abc import Iterable, Sequence

from agl.contracts import MAX_BLOB_BYTES
from agl.errors import ConflictError, StoreError
from agl.schemas import Blob, Record, Span, blob_digests, digest_of
from agl.schemas import _codec as codec
from agl.stores._tables import Reads, Tables, document

SAVED_S = 3600.0
"""Seconds for which a saved blob stays without a span that refers to it."""

RENEWED_S = 600.0
"""Seconds after which saving a known blob again is noted; they are added to :data:`SAVED_S`."""

CHECKED = 1000
"""Largest number of checks that one transaction works through."""

SWEPT = 10_000
"""Number of settled checks after which a removal of rollouts leaves the rest to the next one."""


class Check(Record, frozen=True, kw_only=True):
    """One digest to check, with its document's key, and whether a rollout refers to the blob."""

    key: bytes
    digest: str
    is_used: bool


def save_blobs(tables: Tables, blobs: Sequence[Blob]) -> None:
    """See :meth:`agl.contracts.Store.save_blobs`."""
    for blob in blobs:
        _require_storable(blob)
    for digest, blob in {blob.digest: blob for blob in blobs}.items():
        saved = tables.get(_saved(digest))
        if saved is None:
            tables.put([(document("blob", last=digest), codec.encode(blob))])
        if saved is None or tables.now - float(saved) > RENEWED_S:
            tables.put([(_saved(digest), b"%f" % tables.now), (_check(tables, digest, order=1), b"")])


def _require_storable(blob: Blob) -> None:
    if len(blob.data) > MAX_BLOB_BYTES:
        raise StoreError(
            f"blob {blob.digest} has {len(blob.data):,} bytes, and a store accepts {MAX_BLOB_BYTES:,}; nothing was "
            "saved: send a smaller picture"
        )
    if blob.digest != digest_of(blob.data):
        raise ConflictError(
            f"blob {blob.digest!r} holds data with the digest {digest_of(blob.data)}; nothing was saved: compute the "
            "digest by agl.schemas.digest_of"
        )


def blobs(reads: Reads, digests: Sequence[str]) -> list[Blob]:
    """See :meth:`agl.contracts.Store.blobs`."""
    found = (reads.get(document("blob", last=digest)) for digest in digests)
    return [codec.decode(data, Blob) for data in found if data is not None]


def refer(tables: Tables, spans: Iterable[Span]) -> None:
    """Note the blobs that new spans refer to."""
    for rollout_id, digests in _digests(spans).items():
        known = _listed(tables, rollout_id)
        if new := [digest for digest in digests if digest not in known]:
            tables.put([(_pictures(rollout_id), codec.encode([*known, *new]))])
            tables.put([(_use(digest, rollout_id), b"") for digest in new])


def release(tables: Tables, rollout_ids: Iterable[str]) -> None:
    """Forget which blobs removed rollouts refer to, and check these blobs at the next look."""
    for rollout_id in rollout_ids:
        if digests := _listed(tables, rollout_id):
            tables.delete([_pictures(rollout_id), *(_use(digest, rollout_id) for digest in digests)])
            tables.put([(_check(tables, digest, order=0), b"") for digest in digests])


def loose(reads: Reads, *, after: bytes) -> list[Check]:
    """The first checks whose keys come after a key, at most :data:`CHECKED`."""
    start = document("blob check")
    keys = [key for key, _ in reads.scan(max(start, after + b"\0"), start + b"\xff", limit=CHECKED)]
    digests = [key[len(start) :].decode().rpartition(" ")[2] for key in keys]
    used = {digest: _is_used(reads, digest) for digest in digests}
    return [Check(key=key, digest=each, is_used=used[each]) for key, each in zip(keys, digests, strict=True)]


def drop(tables: Tables, checks: Sequence[Check]) -> int:
    """Remove the unused blobs that nobody has saved lately; returns the number of checks that are settled."""
    # A blob that came into use since the look was saved less than an hour before, so it stays.
    settled = [check for check in checks if check.is_used or _is_old(tables, check.digest)]
    for check in settled:
        gone = () if check.is_used else (document("blob", last=check.digest), _saved(check.digest))
        tables.delete([check.key, *gone])
    return len(settled)


def documents_needed(
    *, spans: Iterable[Span] = (), rollout_ids: Iterable[str] = (), digests: Iterable[str] = ()
) -> list[bytes]:
    """The keys of the documents that operations on these spans, removed rollouts and blobs read."""
    rollouts = dict.fromkeys([*_digests(spans), *rollout_ids])
    return [*map(_pictures, rollouts), *map(_saved, digests)]


def _digests(spans: Iterable[Span]) -> dict[str, dict[str, None]]:
    """The digests that spans refer to, by rollout id."""
    found: dict[str, dict[str, None]] = {}
    for span in spans:
        if digests := blob_digests(span):
            found.setdefault(span.rollout_id, {}).update(dict.fromkeys(digests))
    return found


def _listed(tables: Tables, rollout_id: str) -> list[str]:
    data = tables.get(_pictures(rollout_id))
    return [] if data is None else codec.decode(data, list[str])


def _is_used(reads: Reads, digest: str) -> bool:
    start = _use(digest, "")
    return bool(reads.scan(start, start + b"\xff", limit=1))


def _is_old(tables: Tables, digest: str) -> bool:
    saved = tables.get(_saved(digest))
    return saved is None or tables.now - float(saved) > SAVED_S + RENEWED_S


def _pictures(rollout_id: str) -> bytes:
    return document("pictures", last=rollout_id)


def _saved(digest: str) -> bytes:
    return document("blob saved", last=digest)


def _use(digest: str, rollout_id: str) -> bytes:
    return document("blob use", digest, last=rollout_id)


def _check(tables: Tables, digest: str, *, order: int) -> bytes:
    return document("blob check", last=f"{order} {tables.now:020.6f} {digest}")
