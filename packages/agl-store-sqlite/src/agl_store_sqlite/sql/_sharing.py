"""Finds the earlier call of an attempt that a new call continues, from digests instead of stored bytes.

Of a recent call a :class:`Mark` is kept: digests of its prompt ids, of its prompt ids + response ids, and of its text
without the two closing characters. A new call that starts with the same bytes shares them. Marks are few and small;
losing a mark only costs space.
"""

from collections import OrderedDict
from hashlib import blake2b

import msgspec

KEY_EVERY = 64
MIN_SHARED = 64
MARKS_PER_ATTEMPT = 16
ATTEMPTS = 1024


class Point(msgspec.Struct, frozen=True, gc=False):
    """The digest of the first ``length`` bytes of some data."""

    length: int
    digest: bytes


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The digests of a call that are kept to find later calls which continue it.

    Attributes:
        head: The first bytes of the call's ids, or of its text if it has no ids; used to find similar calls.
        depth: Number of links in the chain of bases from this call to ``key``.
        key: The key call at the start of this call's stretch of the chain; ``None`` for a key call.
        key_ids: Number of bytes of ids shared with ``key``.
        key_text: Number of bytes of text shared with ``key``.
    """

    sequence: int
    head: bytes
    prompt: Point
    ids: Point
    text: Point
    depth: int = 0
    key: "Mark | None" = None
    key_ids: int = 0
    key_text: int = 0


class Share(msgspec.Struct, frozen=True, gc=False):
    """An earlier call (the base) and the numbers of leading bytes of ids and of text that a new call shares with it."""

    base: Mark
    ids: int
    text: int


class Marks:
    """The marks of the calls of the most recently used attempts."""

    def __init__(self) -> None:
        self._marks: OrderedDict[object, list[Mark]] = OrderedDict()

    def add(self, attempt: object, sequence: int, *, prompt: bytes, response: bytes, text: bytes) -> Share | None:
        """Add the mark of a call; return the share that the call has with an earlier call of the attempt, if any."""
        marks = self._marks.setdefault(attempt, [])
        self._marks.move_to_end(attempt)
        head = (prompt or text)[:MIN_SHARED]
        similar = [mark for mark in marks if mark.head == head]
        share = _by_ids(similar, prompt, text) if prompt else _by_text(similar, text)
        mark, share = _link(Mark(sequence, head, *_points(prompt, response, text)), share)
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


def _digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _link(mark: Mark, share: Share | None) -> tuple[Mark, Share | None]:
    """Link a mark into the chain of bases; returns the mark with its links, and the share to use.

    If the stretch of the chain becomes too long, the mark becomes a key call whose base is the previous key call.
    """
    if share is None:
        return mark, None
    base = share.base
    if base.key is None:
        key, key_ids, key_text = base, share.ids, share.text
    else:
        key, key_ids, key_text = base.key, min(share.ids, base.key_ids), min(share.text, base.key_text)
    if base.depth + 1 >= KEY_EVERY:
        return mark, Share(key, key_ids, key_text)
    depth = base.depth + 1
    linked = Mark(mark.sequence, mark.head, mark.prompt, mark.ids, mark.text, depth, key, key_ids, key_text)
    return linked, share
