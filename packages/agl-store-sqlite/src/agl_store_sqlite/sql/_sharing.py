"""Finds the earlier call of an attempt that a new call continues, from digests instead of stored bytes.

Of a recent call a :class:`Mark` is kept: digests of its prompt ids, of its prompt ids + response ids, of its text
without the two closing characters, and of its pictures. A new call that starts with the same ones shares them. Marks
are few and small; losing a mark only costs space.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

KEY_EVERY = 64
MIN_SHARED = 64
MARKS_PER_ATTEMPT = 16
ATTEMPTS = 1024


class Point(msgspec.Struct, frozen=True, gc=False):
    """The digest of the first ``length`` bytes of some data, or of so many pictures."""

    length: int
    digest: bytes


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The digests of a call that are kept to find later calls which continue it.

    Attributes:
        head: The first bytes of the call's ids, or of its text if it has no ids; used to find similar calls.
        depth: Number of links in the chain of bases from this call to its key call.
        key: The share with the key call, at the start of this call's stretch of the chain; ``None`` for a key call.
    """

    sequence: int
    head: bytes
    prompt: Point
    ids: Point
    text: Point
    pictures: Point
    depth: int = 0
    key: "Share | None" = None


class Share(msgspec.Struct, frozen=True, gc=False):
    """An earlier call (the base), and how many leading bytes of ids and text and pictures a new call shares with it."""

    base: Mark
    ids: int
    text: int
    pictures: int = 0


class Marks:
    """The marks of the calls of the most recently used attempts."""

    def __init__(self) -> None:
        self._marks: OrderedDict[object, list[Mark]] = OrderedDict()

    def add(
        self, attempt: object, sequence: int, *, prompt: bytes, response: bytes, text: bytes, pictures: Sequence[bytes]
    ) -> Share | None:
        """Add the mark of a call; return the share that the call has with an earlier call of the attempt, if any."""
        marks = self._marks.setdefault(attempt, [])
        self._marks.move_to_end(attempt)
        head = (prompt or text)[:MIN_SHARED]
        similar = [mark for mark in marks if mark.head == head]
        share = _by_ids(similar, prompt, text) if prompt else _by_text(similar, text)
        if share is not None and pictures:
            known = share.base.pictures
            share = replace(share, pictures=known.length if _of_pictures(pictures[: known.length]) == known else 0)
        points = *_points(prompt, response, text), _of_pictures(pictures)
        mark, share = _link(Mark(sequence, head, *points), share)
        marks.append(mark)
        if len(marks) > MARKS_PER_ATTEMPT:
            del marks[0]
        if len(self._marks) > ATTEMPTS:
            self._marks.popitem(last=False)
        return share

    def forget(self, attempt: object) -> None:
        """Drop the marks of an attempt."""
        self._marks.pop(attempt, None)

    def clear(self) -> None:
        """Drop all marks."""
        self._marks.clear()


def _by_ids(marks: list[Mark], prompt: bytes, text: bytes) -> Share | None:
    points = [(point, mark) for mark in marks for point in (mark.prompt, mark.ids)]
    found = _longest(points, prompt)
    if found is None:
        return None
    length, base = found
    return Share(base, length, base.text.length if _begins(text, base.text) else 0)


def _by_text(marks: list[Mark], text: bytes) -> Share | None:
    found = _longest([(mark.text, mark) for mark in marks], text)
    return found and Share(found[1], 0, found[0])


def _longest(points: list[tuple[Point, Mark]], data: bytes) -> tuple[int, Mark] | None:
    """Find, in one pass, the longest point whose bytes are a prefix of ``data``; of equal points, the newest."""
    best: tuple[int, Mark] | None = None
    if not points:
        return best
    view, digest, at = memoryview(data), blake2b(digest_size=16), 0
    for point, mark in sorted(points, key=lambda pair: pair[0].length):
        if point.length > len(data):
            break
        digest.update(view[at : point.length])
        at = point.length
        if at >= MIN_SHARED and digest.digest() == point.digest:
            best = (at, mark)
    return best


def _begins(data: bytes, point: Point) -> bool:
    return len(data) >= point.length >= MIN_SHARED and _digest(data[: point.length]) == point.digest


def _points(prompt: bytes, response: bytes, text: bytes) -> tuple[Point, Point, Point]:
    end, ids = max(0, len(text) - 2), blake2b(prompt, digest_size=16)
    of_prompt = ids.digest()
    ids.update(response)
    return (
        Point(len(prompt), of_prompt),
        Point(len(prompt) + len(response), ids.digest()),
        Point(end, _digest(memoryview(text)[:end])),
    )


def _of_pictures(pictures: Sequence[bytes]) -> Point:
    return Point(len(pictures), _digest(b"".join(pictures)))


def _digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _link(mark: Mark, share: Share | None) -> tuple[Mark, Share | None]:
    """Link a mark into the chain of bases; returns the mark with its links, and the share to use.

    If the stretch of the chain becomes too long, the mark becomes a key call whose base is the previous key call.
    """
    if share is None:
        return mark, None
    base, of_key = share.base, share
    if base.key is not None:
        old = base.key
        of_key = Share(old.base, min(share.ids, old.ids), min(share.text, old.text), min(share.pictures, old.pictures))
    if base.depth + 1 >= KEY_EVERY:
        return mark, of_key
    return replace(mark, depth=base.depth + 1, key=of_key), share
