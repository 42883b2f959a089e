"""Numbers spans and packs them into bytes: ids stay packed, and the prompts of a conversation share their prefix.

The prompt ids, the request text and the pictures of a model call are stored as (sequence of an earlier call of the
attempt, size of the shared beginning, rest). A later call can share the earlier prompt + response ids, the earlier
request text, and the earlier pictures. The request text has the keys of the request that grow or stay the same over a
conversation, the growing one last, so that the text of the next turn extends it. Other keys of the request, such as a
seed, are stored with each call.

An earlier call is the base of the later one. Bases form chains with two kinds of links: from turn to turn, and from key
call to key call (every ``KEY_EVERY`` turns). So a single span of N is read over at most ``KEY_EVERY`` + N /
``KEY_EVERY`` links, and a whole attempt in linear time.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from msgspec.structs import force_setattr, replace

from agl import semconv
from agl.errors import StoreError
from agl.schemas import Json, MediaSpan, ModelCall, Span, attempt_id_of, decode, encode, to_json
from agl.stores import DAMAGE, note_damage, placed
from agl_store_sqlite.sql._sharing import Marks

MIN_DEFLATED = 512
SHARED_KEYS = ("functions", "tools", "system", "instructions", "prompt", "input", "messages")
"""The keys of a request that form its text, in this order."""

_PICTURES = ("inputs", "media", "processor")
_Pictures = tuple[tuple[str, ...], tuple[MediaSpan, ...], str]
_NO_PICTURES: _Pictures = (), (), ""
_APART: dict[str, Any] = dict(prompt_ids=b"", response_ids=b"", response=None, inputs=(), media=(), processor="")
"""The fields that are empty in a stored call, because their values are stored next to it."""

_PLAIN = b"\x00"
_CALL = b"\x01"


class _Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A span with a model call, as stored.

    Attributes:
        span: The span without its call.
        call: The call without ids, response and pictures; its request has only the keys that are not shared.
        ids: The prompt ids after the first ``shared_ids`` bytes and the response ids: the two low bytes of each,
            plane by plane; deflated for a call with pictures, whose placeholders are one id again and again.
        response_len: Bytes of response ids.
        text: The request text after the first ``shared_text`` bytes, the response JSON, the pictures, whose digests the
            request has too, and the two high planes of ``ids``; all of them deflate well.
        request_end: Offset in the inflated text at which the response begins.
        response_end: Offset in the inflated text at which the response ends.
        base: Sequence of the call with which bytes are shared; 0 for none.
        pictures_len: Bytes of ``inputs``, ``media`` and ``processor`` of the call, after the response in the inflated
            text. Calls stored by earlier versions end before this field.
        shared_pictures: Number of first ``inputs`` and ``media`` that are those of the base, as is ``processor`` if
            there are any.
    """

    span: Span
    call: ModelCall
    ids: bytes
    response_len: int
    text: bytes
    request_end: int
    response_end: int
    is_deflated: bool
    base: int = 0
    shared_ids: int = 0
    shared_text: int = 0
    pictures_len: int = 0
    shared_pictures: int = 0

    @property
    def pictures_end(self) -> int:
        return self.response_end + self.pictures_len


class _Whole(msgspec.Struct, frozen=True, gc=False):
    """The inflated bytes of a call, which later calls may share."""

    prompt: bytes
    response: bytes
    text: bytes
    pictures: _Pictures


class Packer:
    """Turns spans into bytes; one per store, used under the store's lock or by its writer thread."""

    def __init__(self) -> None:
        self._marks = Marks()

    def pack(self, span: Span, *, attempt: object, sequence: int) -> bytes:
        """Pack the span into bytes to keep at ``sequence`` of ``attempt``."""
        try:
            call = span.call
            return _PLAIN + encode(span) if call is None else self._pack_call(span, call, attempt, sequence)
        except (TypeError, ValueError, OverflowError) as error:
            self.clear()
            raise StoreError(
                f"span {span.span_id!r} ({span.name!r}) of attempt {span.attempt_id!r} cannot be stored: {error}; "
                "attributes, request and response must be JSON"
            ) from error

    def _pack_call(self, span: Span, call: ModelCall, attempt: object, sequence: int) -> bytes:
        encode((call.request, call.response))  # refuses integers beyond 64 bits, which the JSON below would take
        text, rest = _split(call.request)
        prompt, reply = call.prompt_ids, call.response_ids
        seen = [encode(each) for each in _each_picture(call)]
        share = self._marks.add(attempt, sequence, prompt=prompt, response=reply, text=text, pictures=seen)
        known = share.pictures if share else 0
        suffix = text[share.text :] if share else text
        response = b"" if call.response is None else to_json(call.response)
        low, high = _squeeze((prompt[share.ids :] if share else prompt) + reply)
        new = call.inputs[known:], call.media[known:], "" if known else call.processor
        pictures = encode(new) if seen else b""
        body = b"".join((suffix, response, pictures, high))
        is_long = len(suffix) + len(response) >= MIN_DEFLATED
        deflated = zlib.compress(body, 1) if is_long or pictures else body
        packed = _Packed(
            span=replace(span, call=None),
            call=replace(call, request=rest, **_APART),
            ids=zlib.compress(low, 1) if pictures else low,
            response_len=len(reply),
            text=min(body, deflated, key=len),
            request_end=len(suffix),
            response_end=len(suffix) + len(response),
            pictures_len=len(pictures),
            is_deflated=len(deflated) < len(body),
            base=share.base.sequence if share else 0,
            shared_ids=share.ids if share else 0,
            shared_text=share.text if share else 0,
            shared_pictures=known,
        )
        return _CALL + encode(packed)

    def forget(self, attempt: object) -> None:
        """Forget the calls of an attempt that ended, or whose last span was not stored, as bases of later calls."""
        self._marks.forget(attempt)

    def clear(self) -> None:
        """Forget all calls as bases of later calls, because the last packed spans may not have been stored."""
        self._marks.clear()


@dataclass(kw_only=True)
class AttemptSpans:
    """The spans of an attempt that a store has already.

    Attributes:
        key: The store's key of the attempt, such as its number.
        last: Highest stored sequence.
        is_late: Whether the attempt is decided.
        has: Returns true if the span with that id is stored.
    """

    key: Any
    last: int
    is_late: bool
    has: Callable[[str], bool]


def place_spans(
    spans: Sequence[Span], packer: Packer, find: Callable[[Span], AttemptSpans]
) -> tuple[list[tuple[Any, int, str, bytes]], list[Span]]:
    """Number and pack the spans that are not stored yet.

    All spans are packed before the caller stores the first, so nothing is stored if a span cannot be packed.

    Returns:
        A row for each new span (key of the attempt, sequence, span id, packed span), and the new spans as stored.
    """
    rows: dict[tuple[Any, str], tuple[Any, int, str, bytes]] = {}
    known: dict[tuple[str, str], AttemptSpans] = {}
    new: list[Span] = []
    try:
        for span in spans:
            where = span.rollout_id, span.attempt_id
            held = known.get(where) or known.setdefault(where, find(span))
            if (held.key, span.span_id) in rows or held.has(span.span_id):
                continue
            kept = placed(span, last=held.last, is_late=held.is_late)
            held.last = kept.sequence
            packed = packer.pack(kept, attempt=held.key, sequence=held.last)
            rows[held.key, span.span_id] = held.key, held.last, span.span_id, packed
            new.append(kept)
    except StoreError:
        packer.clear()  # the packer's marks may refer to spans that are not stored
        raise
    return list(rows.values()), new


class Unpacker:
    """Turns bytes of one attempt back into spans.

    Args:
        fetch: Returns the stored bytes at a sequence of the attempt, for a base that was not unpacked before.
        rollout_id: The attempt's rollout.
        number: The attempt's number; 0 for spans of no attempt.
    """

    def __init__(self, fetch: Callable[[int], bytes], *, rollout_id: str, number: int) -> None:
        self._fetch, self._rollout_id = fetch, rollout_id
        self._attempt_id = attempt_id_of(rollout_id, number) if number else ""
        self._known: dict[int, _Whole] = {}

    def unpack(self, data: bytes, *, sequence: int) -> Span:
        """Unpack the span stored at ``sequence``; a span called ``agl.unreadable`` stands for a damaged one."""
        try:
            is_plain = data[:1] == _PLAIN
            span = decode(memoryview(data)[1:], Span) if is_plain else self._join(_open(data), sequence)
        except DAMAGE as error:
            note_damage(f"span {sequence} of attempt {self._attempt_id or self._rollout_id!r}", str(error))
            span = self._unreadable(sequence, error)
        force_setattr(span, "sequence", sequence)
        return span

    def _unreadable(self, sequence: int, error: Exception) -> Span:
        # Left out, it would make the page of spans look like the attempt's last.
        return Span(
            rollout_id=self._rollout_id,
            attempt_id=self._attempt_id,
            span_id=f"8{sequence:015x}",
            name=semconv.UNREADABLE,
            status="error",
            status_message=f"the stored span cannot be read (damaged, or of another version of agl): {error}",
        )

    def _join(self, packed: _Packed, sequence: int) -> Span:
        whole = self._resolve(sequence, packed)
        call = packed.call
        force_setattr(call, "prompt_ids", whole.prompt)
        force_setattr(call, "response_ids", whole.response)
        force_setattr(call, "request", _merge(whole.text, call.request))
        force_setattr(call, "response", _parse(packed.text[packed.request_end : packed.response_end]))
        if packed.pictures_len:
            for name, value in zip(_PICTURES, whole.pictures, strict=True):
                force_setattr(call, name, value)
        force_setattr(packed.span, "call", call)
        return packed.span

    def _resolve(self, sequence: int, packed: _Packed) -> _Whole:
        chain = [(sequence, packed)]
        while (base := chain[-1][1].base) and base not in self._known:
            if base >= chain[-1][0]:
                raise ValueError(f"the call at sequence {chain[-1][0]} refers to one at {base}")
            chain.append((base, _open(self._fetch(base))))
        for at, link in reversed(chain):
            self._known[at] = _restore(link, self._known.get(link.base))
        return self._known[sequence]


def _restore(packed: _Packed, base: _Whole | None) -> _Whole:
    text = packed.text[: packed.request_end]
    low = zlib.decompress(packed.ids) if packed.pictures_len else packed.ids
    ids = _widen(low, packed.text[packed.pictures_end :])
    split = len(ids) - packed.response_len
    prompt, response = ids[:split], ids[split:]
    pictures = _NO_PICTURES
    if packed.pictures_len:
        pictures = decode(packed.text[packed.response_end : packed.pictures_end], _Pictures)
    if base is not None:
        pictures = _joined(base.pictures, pictures, packed.shared_pictures)
        prompt = _head(base.prompt, base.response, packed.shared_ids) + prompt
        text = base.text[: packed.shared_text] + text
    return _Whole(prompt, response, text, pictures)


def _each_picture(call: ModelCall) -> Iterator[_Pictures]:
    """Yield the first input and run of placeholders with the processor, then the second ones, and so on."""
    for at in range(max(len(call.inputs), len(call.media))):
        yield call.inputs[at : at + 1], call.media[at : at + 1], call.processor


def _joined(base: _Pictures, own: _Pictures, shared: int) -> _Pictures:
    return (base[0][:shared] + own[0], base[1][:shared] + own[1], base[2]) if shared else own


def _head(first: bytes, second: bytes, length: int) -> bytes:
    """Return the first ``length`` bytes of ``first + second``."""
    return first[:length] + second[: max(0, length - len(first))]


def _squeeze(ids: bytes) -> tuple[bytes, bytes]:
    """Split packed int32 ids into their two low and two high byte planes; odd lengths stay whole."""
    if len(ids) % 4:
        return ids, b""
    return ids[0::4] + ids[1::4], ids[2::4] + ids[3::4]


def _widen(low: bytes, high: bytes) -> bytes:
    """Join byte planes; the inverse of :func:`_squeeze`."""
    if not high:
        return low
    count = len(low) // 2
    ids = bytearray(4 * count)
    ids[0::4], ids[1::4] = low[:count], low[count:]
    ids[2::4], ids[3::4] = high[:count], high[count:]
    return bytes(ids)


def _split(request: Json) -> tuple[bytes, Json]:
    """Split a request into the text that later requests may share, and the rest."""
    if not isinstance(request, dict):
        return b"", request
    body = cast("dict[str, Any]", request)
    shared = {key: body[key] for key in SHARED_KEYS if key in body}
    return to_json(shared), {key: value for key, value in body.items() if key not in shared}


def _merge(text: bytes, rest: Json) -> Json:
    """Join the parts of a request; the inverse of :func:`_split`."""
    return rest | msgspec.json.decode(text) if text else rest


def _parse(text: bytes) -> Json:
    return msgspec.json.decode(text) if text else None


def _open(data: bytes) -> _Packed:
    """Inflate the text of a stored call."""
    packed = decode(memoryview(data)[1:], _Packed)
    if packed.is_deflated:
        force_setattr(packed, "text", zlib.decompress(packed.text))
    return packed
