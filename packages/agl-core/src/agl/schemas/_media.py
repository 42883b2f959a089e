"""Pictures in model calls: the payload, the tokens that stand for it, and the ids by which prompts are compared.

A vision model puts a run of equal placeholder tokens into the prompt for each picture, so two prompts that differ only
in a picture have equal token ids. :func:`identity_ids` makes them differ. Pixel tensors, positions and token types are
derived from the payload by the processor, and are never stored.
"""

import hashlib
from collections.abc import Sequence

from agl.schemas._base import Int64, Record


class Blob(Record, frozen=True, kw_only=True):
    """A payload that is not tokens, such as a picture; a store holds each digest once.

    Attributes:
        digest: ``sha256:<hex>`` of ``data``, see :func:`digest_of`.
        media_type: The payload's MIME type, such as ``image/png``.
    """

    digest: str
    media_type: str
    data: bytes


class MediaSpan(Record, frozen=True, kw_only=True):
    """One run of placeholder tokens that stands for a picture; the marks around the run are not part of it.

    Attributes:
        offset: Index of the first placeholder, in the prompt of a call or in a row.
        length: Number of placeholders.
        modality: ``image``.
        digest: The digest of the picture's :class:`Blob`.
        grid: Small integers with which the processor describes the picture's patches; only the processor reads them.
    """

    offset: Int64
    length: Int64
    modality: str
    digest: str
    grid: tuple[Int64, ...] = ()


def digest_of(data: bytes) -> str:
    """The digest by which a payload is stored: ``sha256:<hex>``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def media_fault(media: Sequence[MediaSpan], tokens: int) -> str:
    """The reason why these spans cannot lie in a prompt of this many tokens; ``""`` if they can."""
    end = 0
    for span in media:
        if span.length < 1 or span.offset < end or span.offset + span.length > tokens:
            return f"a picture at token {span.offset} with {span.length} tokens, in a prompt of {tokens}"
        end = span.offset + span.length
    return ""


def identity_ids(ids: bytes, media: Sequence[MediaSpan]) -> bytes:
    """Packed ids of equal length in which negative numbers from the picture's digest replace its placeholders.

    Prompts that differ only in a picture differ in these ids. Without media, the result is ``ids`` itself.
    """
    if not media:
        return ids
    found = bytearray(ids)
    for span in media:
        start, stop = span.offset * 4, (span.offset + span.length) * 4
        words = bytearray(hashlib.sha256(span.digest.encode()).digest())
        words[3::4] = bytes(byte | 0x80 for byte in words[3::4])
        run = bytes(words) * (span.length // 8 + 1)
        found[start:stop] = run[: len(found[start:stop])]
    return bytes(found)
