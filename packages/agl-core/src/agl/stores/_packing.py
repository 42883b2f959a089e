"""Spans as bytes: packed ids stay packed, and a conversation's prompts share their prefix.

A model call keeps its prompt ids and its request JSON as (sequence of an earlier call of the attempt, shared byte
length, suffix). The bytes that a later call can share are the earlier prompt followed by the earlier response, and
the earlier request text; the growing key of the request (``messages``, ``input`` or ``prompt``) is serialised last so
that the next turn's text extends it.

The packer remembers recent calls of running attempts to find bases; losing that memory costs only space. A chain of
bases has links of two kinds, turn to turn and key call to key call (every ``KEY_EVERY`` turns), so a single span is
read over at most ``KEY_EVERY`` plus N / ``KEY_EVERY`` links, and a whole attempt in linear time.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import msgspec
from msgspec.structs import force_setattr, replace

from agl import codec
from agl.errors import StoreError
from agl.schemas import Json, ModelCall, Span

KEY_EVERY = 64
MIN_SHARED = 64
MIN_DEFLATED = 512
RECENT_CALLS = 16
GROWING_KEYS = ("prompt", "input", "messages")

_PLAIN = b"\x00"
_CALL = b"\x01"


class _Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A span with a model call, as stored.

    Attributes:
        span: Without its call.
        call: Without prompt ids, request and response; its response ids are squeezed.
        ids: The squeezed prompt ids after the first ``shared_ids`` bytes.
        text: The request JSON after the first ``shared_text`` bytes, then the response JSON.
        split: Where in the inflated ``text`` the response begins.
        base: Sequence of the call that holds the shared bytes; 0 for none.
    """

    span: Span
    call: ModelCall
    ids: bytes
    text: bytes
    split: int
    is_deflated: bool
    base: int = 0
    shared_ids: int = 0
    shared_text: int = 0


class _Known(msgspec.Struct, frozen=True, gc=False):
    """What later calls may share of a call; ``depth`` counts links to the key call ``key`` of its chain."""

    sequence: int
    prompt: bytes
    response: bytes
    text: bytes
    depth: int = 0
    key: "_Known | None" = None
    key_ids: int = 0
    key_text: int = 0

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.response) + len(self.text)


class _Share(msgspec.Struct, frozen=True, gc=False):
    """A base and how many bytes of ids and of text are shared with it."""

    base: _Known
    ids: int
    text: int


class Packer:
    """Turns spans into bytes; one per store, used under the store's lock or by its writer thread.

    Attributes:
        limit: Bytes of recent calls to remember over all attempts.
    """

    def __init__(self, *, limit: int = 32_000_000) -> None:
        self.limit = limit
        self._recent: OrderedDict[object, list[_Known]] = OrderedDict()
        self._size = 0

    def pack(self, span: Span, *, attempt: object, sequence: int) -> bytes:
        """The span as bytes to keep at ``sequence`` of ``attempt``."""
        try:
            return (
                _PLAIN + codec.encode(span)
                if span.call is None
                else self._pack_call(span, span.call, attempt, sequence)
            )
        except (TypeError, ValueError, OverflowError) as error:
            self.clear()
            raise StoreError(
                f"span {span.span_id!r} ({span.name!r}) of attempt {span.attempt_id!r} cannot be stored: {error}; "
                "attributes, request and response must be JSON"
            ) from error

    def _pack_call(self, span: Span, call: ModelCall, attempt: object, sequence: int) -> bytes:
        text = _request_text(call.request)
        share = self._find(attempt, call.prompt_ids, text)
        known, share = _link(sequence, call, text, share)
        self._remember(attempt, known)
        suffix = text[share.text :] if share else text
        body = suffix + (b"" if call.response is None else codec.to_json(call.response))
        deflated = zlib.compress(body, 1) if len(body) >= MIN_DEFLATED else body
        packed = _Packed(
            span=replace(span, call=None),
            call=replace(call, prompt_ids=b"", response_ids=_squeeze(call.response_ids), request=None, response=None),
            ids=_squeeze(call.prompt_ids[share.ids :] if share else call.prompt_ids),
            text=min(body, deflated, key=len),
            split=len(suffix),
            is_deflated=len(deflated) < len(body),
            base=share.base.sequence if share else 0,
            shared_ids=share.ids if share else 0,
            shared_text=share.text if share else 0,
        )
        return _CALL + codec.encode(packed)

    def forget(self, attempt: object) -> None:
        """Drop what is remembered of an attempt that ended."""
        self._size -= sum(known.size for known in self._recent.pop(attempt, ()))

    def clear(self) -> None:
        """Drop everything, because what was packed last may not have been kept."""
        self._recent.clear()
        self._size = 0

    def _find(self, attempt: object, prompt: bytes, text: bytes) -> _Share | None:
        best: _Share | None = None
        for known in reversed(self._recent.get(attempt, ())):
            ids = _shared(known.prompt, known.response, prompt) & ~3
            share = _Share(known, ids, _common(known.text, text))
            if best is None or (share.ids, share.text) > (best.ids, best.text):
                best = share
            if ids == len(known.prompt) + len(known.response) > 0:
                break
        return best if best is not None and best.ids + best.text >= MIN_SHARED else None

    def _remember(self, attempt: object, known: _Known) -> None:
        calls = self._recent.setdefault(attempt, [])
        calls.append(known)
        self._size += known.size
        if len(calls) > RECENT_CALLS:
            self._size -= calls.pop(0).size
        self._recent.move_to_end(attempt)
        while self._size > self.limit and len(self._recent) > 1:
            self.forget(next(iter(self._recent)))


def mark_late(span: Span, *, is_late: bool) -> Span:
    """The span with its ``is_late`` as the store sees it."""
    return span if span.is_late == is_late else replace(span, is_late=is_late)


class Unpacker:
    """Turns bytes of one attempt back into spans.

    Args:
        fetch: Gives the stored bytes at a sequence of the attempt, for a base that was not unpacked before.
    """

    def __init__(self, fetch: Callable[[int], bytes]) -> None:
        self._fetch = fetch
        self._known: dict[int, _Known] = {}

    def unpack(self, data: bytes, *, sequence: int) -> Span:
        """The span that was stored at ``sequence``."""
        is_plain = data[:1] == _PLAIN
        span = codec.decode(memoryview(data)[1:], Span) if is_plain else self._join(_open(data), sequence)
        force_setattr(span, "sequence", sequence)
        return span

    def _join(self, packed: _Packed, sequence: int) -> Span:
        known = self._resolve(sequence, packed)
        call = packed.call
        force_setattr(call, "prompt_ids", known.prompt)
        force_setattr(call, "response_ids", known.response)
        force_setattr(call, "request", _parse(known.text))
        force_setattr(call, "response", _parse(packed.text[packed.split :]))
        force_setattr(packed.span, "call", call)
        return packed.span

    def _resolve(self, sequence: int, packed: _Packed) -> _Known:
        chain = [(sequence, packed)]
        while (base := chain[-1][1].base) and base not in self._known:
            chain.append((base, _open(self._fetch(base))))
        for at, link in reversed(chain):
            self._known[at] = _restore(at, link, self._known.get(link.base))
        return self._known[sequence]


def _restore(sequence: int, packed: _Packed, base: _Known | None) -> _Known:
    suffix = packed.text[: packed.split]
    prompt, text = _widen(packed.ids), suffix
    if base is not None:
        prompt = _head(base.prompt, base.response, packed.shared_ids) + prompt
        text = base.text[: packed.shared_text] + suffix
    return _Known(sequence, prompt, _widen(packed.call.response_ids), text)


def _head(first: bytes, second: bytes, length: int) -> bytes:
    """The first ``length`` bytes of ``first + second``."""
    return first[:length] + second[: max(0, length - len(first))]


def _link(sequence: int, call: ModelCall, text: bytes, share: _Share | None) -> tuple[_Known, _Share | None]:
    """What to remember of a call, and its base: the one found, or that one's key call where the chain is long."""
    if share is None:
        return _Known(sequence, call.prompt_ids, call.response_ids, text), None
    base = share.base
    if base.depth + 1 >= KEY_EVERY and base.key is not None:
        share = _Share(base.key, min(share.ids, base.key_ids), min(share.text, base.key_text))
        return _Known(sequence, call.prompt_ids, call.response_ids, text), share
    key, key_ids, key_text = (
        (base, share.ids, share.text)
        if base.key is None
        else (
            base.key,
            min(share.ids, base.key_ids),
            min(share.text, base.key_text),
        )
    )
    known = _Known(sequence, call.prompt_ids, call.response_ids, text, base.depth + 1, key, key_ids, key_text)
    return known, share


def _shared(first: bytes, second: bytes, other: bytes) -> int:
    """How many leading bytes ``other`` has in common with ``first + second``."""
    length = _common(first, other)
    if length < len(first):
        return length
    return length + _common(second, other[length : length + len(second)])


def _common(left: bytes, right: bytes) -> int:
    """Length of the common prefix, by bisection over slice comparisons."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _squeeze(ids: bytes) -> bytes:
    """Packed int32 ids without their highest bytes, plane by plane, where those are all zero; else as they are."""
    count = len(ids) // 4
    if len(ids) % 4 or ids[3::4].count(0) != count:
        return b"4" + ids
    return b"3" + ids[0::4] + ids[1::4] + ids[2::4]


def _widen(squeezed: bytes) -> bytes:
    """The inverse of :func:`_squeeze`."""
    if squeezed[:1] != b"3":
        return squeezed[1:]
    count = len(squeezed) // 3
    ids = bytearray(4 * count)
    for plane in range(3):
        ids[plane::4] = squeezed[1 + plane * count : 1 + (plane + 1) * count]
    return bytes(ids)


def _request_text(request: Json) -> bytes:
    if request is None:
        return b""
    if not isinstance(request, dict):
        return codec.to_json(request)
    body = cast("dict[str, Any]", request)
    growing = [key for key in GROWING_KEYS if key in body]
    if not growing:
        return codec.to_json(body)
    ordered = {key: value for key, value in body.items() if key not in growing}
    return codec.to_json(ordered | {key: body[key] for key in growing})


def _parse(text: bytes) -> Json:
    return msgspec.json.decode(text) if text else None


def _open(data: bytes) -> _Packed:
    """A stored call with its text inflated."""
    packed = codec.decode(memoryview(data)[1:], _Packed)
    if packed.is_deflated:
        force_setattr(packed, "text", zlib.decompress(packed.text))
    return packed
