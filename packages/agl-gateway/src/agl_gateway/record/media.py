"""Prepares the media of recorded calls for the store: each payload is redacted and written once, not with every call.

An agent sends the screenshot of its first turn again with each later one. So the gateway remembers which payloads it
has written, for less time than a store keeps a payload that no span refers to.
"""

import logging
import math
import time
from collections.abc import Iterable

from agl.contracts import MAX_BLOB_BYTES
from agl.schemas import Blob
from agl_gateway.recent import Recent
from agl_gateway.record.redaction import Redaction

_log = logging.getLogger(__name__)

_REMEMBERED = 10_000
_WRITTEN_S = 1800.0
"""Seconds after which a payload is written again; stores keep it for an hour while no span refers to it."""


class WrittenMedia:
    """Remembers the payloads that are in the store or the spool. Used in one event loop only."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._digests: Recent[str, str] = Recent(_REMEMBERED)
        self._written: Recent[str, float] = Recent(_REMEMBERED)

    async def prepared(self, blobs: Iterable[Blob]) -> tuple[dict[str, str], list[Blob]]:
        """Redact the payloads of a call.

        Returns:
            The digests of payloads that redaction changed, with the new digest or, for a payload that is not stored,
            ``""``; and the payloads to write with the call.

        Raises:
            Problem: The redactor raised.
        """
        changed, unwritten = dict[str, str](), list[Blob]()
        for blob in blobs:
            digest = self._digests.get(blob.digest)
            if digest is None and not _is_storable(blob):
                digest = self._digests[blob.digest] = blob.digest
                self._written[digest] = math.inf  # it is not looked at again
            elif digest is None or not self._is_written(digest):
                kept = await self._redaction.of_blob(blob)
                digest = self._digests[blob.digest] = "" if kept is None else kept.digest
                if kept is not None and _is_storable(kept):
                    unwritten.append(kept)
            if digest != blob.digest:
                changed[blob.digest] = digest
        return changed, unwritten

    def add(self, blobs: Iterable[Blob], *, anew: bool = False) -> None:
        """Remember payloads that the store or the spool has taken.

        Args:
            anew: Forget all others, for the first calls in a spool: an outage may last longer than a store keeps
                payloads without spans, so later calls bring theirs again.
        """
        if anew:
            self._written.clear()
            self._digests.clear()
        for blob in blobs:
            self._written[blob.digest] = time.monotonic()

    def _is_written(self, digest: str) -> bool:
        return not digest or time.monotonic() - self._written.get(digest, -_WRITTEN_S) < _WRITTEN_S


def _is_storable(blob: Blob) -> bool:
    is_small = len(blob.data) <= MAX_BLOB_BYTES
    if not is_small:
        _log.warning("a call's input of %d bytes is recorded by its digest only; send a smaller one", len(blob.data))
    return is_small
