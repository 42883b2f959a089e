"""Packing spans into a store's bytes: spans are complete when read, and small when calls share prompts."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl import semconv
from agl.errors import StoreError
from agl.schemas import Json, MediaSpan, ModelCall, Span, digest_of, pack_ids
from agl.stores import note_damage
from agl_store_sqlite.sql.packing import AttemptSpans, Packer, Unpacker, place_spans

STORED = (
    "019bde0004aa726f6c6c6f75745f6964a172aa617474656d70745f6964a3722e31a77370616e5f6964a27331a46e616d65a16ede0004aa72"
    "6571756573745f6964a27131a76469616c656374a463686174a56d6f64656ca16da77265717565737480c40c010203700405000000110000"
    "08c4447b226d65737361676573223a5b7b22726f6c65223a2275736572222c22636f6e74656e74223a226869227d5d7d7b226f6b223a7472"
    "75657d0000000100000000000000002d38c2000000"
)
"""A call of 0.1.0 before pictures had fields of their own. New fields belong at the end of the stored form."""

STORED_WITH_PICTURE = (
    "019cde0004aa726f6c6c6f75745f6964a172aa617474656d70745f6964a3722e31a77370616e5f6964a27330a46e616d65a16ede0004aa72"
    "6571756573745f6964a27130a76469616c656374a463686174a56d6f64656ca16da77265717565737480c42778014b4fc7040c8c4ccc2cac"
    "6cec1c9c5cdc3cbc7cfc028242c20c8c0158000356000049240f0c08c4e07801ad903d6ec3300c85d32247c80102ce4161c98ee4e80259bb"
    "1745a11fd231605b85a40c8191b107087285d6e8097a97dea64a962edd9ac785e44790e01ba1c718758311d4d308c177080af61103acc0fa"
    "21e190ae241d5e2fa4edf3eccb3e7419ffe66a844b4b41dc69be16ca885a54e888cbd2144e0866c86e4c258988eb82d6c87183c24963a4b0"
    "3516a46bc93017865586970e8ec7e71ce7d3f7f6461b4f6f93278a986653874393768bcfde3bddb5e9f071fd63726d3621ddece07b135a77"
    "be5bccbf1e83b7d9631f96eca15832cd4d692b77ff8766ffd40fbd057b6ecc9dcc9dc3000000ccdc"
)
"""The first turn of ``seeing(1, tokens=20)``, stored before calls shared pictures."""


def span(number: int, call: ModelCall | None = None, **fields: object) -> Span:
    given = {"rollout_id": "r", "attempt_id": "r.1", "span_id": f"s{number}", "name": "n", **fields}
    return Span(call=call, **given)  # pyright: ignore[reportArgumentType]  # a test's shorthand


def called(
    number: int,
    *,
    prompt: Sequence[int] | bytes = (),
    response: Sequence[int] | bytes = (),
    request: Json = None,
    answer: Json = None,
    media: Sequence[MediaSpan] = (),
) -> Span:
    ids = [each if isinstance(each, bytes) else pack_ids(each) for each in (prompt, response)]
    call = ModelCall(
        request_id=f"q{number}",
        dialect="chat",
        model="m",
        prompt_ids=ids[0],
        response_ids=ids[1],
        request=request,
        response=answer,
        inputs=tuple(each.digest for each in media),
        media=tuple(media),
        processor="Processor 1.0 1a2b3c4d" if media else "",
    )
    return span(number, call)


def seeing(turns: int, *, tokens: int) -> list[Span]:
    """Return the turns of an agent that sees one more picture in each, of so many tokens."""
    ids: list[int] = []
    media: list[MediaSpan] = []
    spans: list[Span] = []
    for number in range(turns):
        digest = digest_of(b"picture %d" % number)
        media.append(MediaSpan(offset=len(ids), length=tokens, modality="image", digest=digest, grid=(1, tokens, 4)))
        ids += [*[151_655] * tokens, *range(100 * number, 100 * number + 20)]
        shown = [{"type": "image_url", "image_url": {"url": each.digest}} for each in media]
        request: Json = {"messages": [{"role": "user", "content": [each]} for each in shown]}
        spans.append(called(number, prompt=ids, response=[number, 1], request=request, media=media))
        ids += [number, 1]
    return spans


class Kept:
    """The packed spans of one attempt, by sequence number from 1."""

    def __init__(self, spans: Sequence[Span], *, attempt: object = "r.1") -> None:
        self.spans = list(spans)
        packer = Packer()
        self.data = {n: packer.pack(each, attempt=attempt, sequence=n) for n, each in enumerate(spans, start=1)}
        self.fetched: list[int] = []

    def fetch(self, sequence: int) -> bytes:
        self.fetched.append(sequence)
        return self.data[sequence]

    def read(self, *sequences: int) -> list[Span]:
        """Return the spans with these sequence numbers, all unpacked by one reader."""
        self.fetched.clear()
        reader = Unpacker(self.fetch, rollout_id="r", number=1)
        return [reader.unpack(self.data[n], sequence=n) for n in sequences]

    def size(self, sequence: int) -> int:
        return len(self.data[sequence])

    def check(self) -> None:
        """Check that all spans come back unchanged when read in order, backwards, and each by a separate reader."""
        expected = [msgspec.structs.replace(each, sequence=n) for n, each in enumerate(self.spans, start=1)]
        assert expected == self.read(*self.data)
        assert [] == self.fetched
        assert expected[::-1] == self.read(*reversed(self.data))
        assert expected == [self.read(n)[0] for n in self.data]


def conversation(turns: int, *, tokens: int = 100) -> list[Span]:
    """Return the turns of one agent: each prompt is the previous prompt and answer, with a new question."""
    draw = random.Random(turns)
    ids: list[int] = []
    messages: list[Json] = []
    spans: list[Span] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} {draw.random()}"})
        ids += [draw.randrange(150_000) for _ in range(tokens)]
        answer = [draw.randrange(150_000) for _ in range(20)]
        request: Json = {"model": "m", "seed": turn, "messages": list(messages)}
        spans.append(called(turn, prompt=ids, response=answer, request=request, answer={"content": f"answer {turn}"}))
        ids += answer
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return spans


def test_plain_span_comes_back_as_it_was() -> None:
    Kept([span(1, attributes={"a": [1, None, "x"]}), span(2)]).check()


@pytest.mark.parametrize(
    "request_",
    [None, "text", 7, [1, 2], {}, {"messages": []}, {"seed": 1}, {"messages": [{"content": "hi"}], "seed": 1}],
)
@pytest.mark.parametrize("answer", [None, {"choices": []}, "text", {"content": "x" * 600}])
def test_call_comes_back_as_it_was(request_: Json, answer: Json) -> None:
    Kept([called(n, prompt=range(n), response=range(3), request=request_, answer=answer) for n in range(3)]).check()


@pytest.mark.parametrize("body", [{"messages": [2**64]}, {"seed": -(2**63) - 1}])
def test_integer_beyond_64_bits_is_refused_wherever_it_stands(body: Json) -> None:
    for each in (called(1, request=body), called(1, answer=body)):
        with pytest.raises(StoreError, match=r"'s1' \('n'\) of attempt 'r\.1' cannot be stored"):
            Packer().pack(each, attempt="r.1", sequence=1)


@pytest.mark.parametrize("ids", [(0,), (1, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1), tuple(range(70_000, 70_300))])
def test_ids_of_every_size_come_back(ids: tuple[int, ...]) -> None:
    Kept([called(1, prompt=ids, response=ids[::-1]), called(2, prompt=ids[::-1]), called(3, response=ids)]).check()


@pytest.mark.parametrize(("prompt", "response"), [(b"12345", b"123"), (b"1234567", b""), (b"123", b"45"), (b"", b"1")])
def test_ids_that_are_no_whole_numbers_come_back(prompt: bytes, response: bytes) -> None:
    Kept([called(1, prompt=prompt, response=response), called(2, prompt=response, response=prompt)]).check()


def drawn(count: int, *, seed: int = 0) -> list[int]:
    """Return random ids, which do not compress."""
    draw = random.Random(seed)
    return [draw.randrange(65_536) for _ in range(count)]


def prose(length: int, *, seed: int = 0) -> str:
    """Return random text, which hardly compresses."""
    draw = random.Random(seed)
    return "".join(draw.choice("0123456789abcdefghijklmnopqrstuvwxyz") for _ in range(length))


def test_small_ids_take_two_bytes_each() -> None:
    kept = Kept([called(1, prompt=drawn(2000), response=drawn(2000, seed=1), request={"messages": ["x" * 600]})])
    kept.check()
    assert kept.size(1) < 2 * 4000 + 500


@pytest.mark.parametrize("where", ["request", "answer"])
def test_long_text_is_deflated(where: str) -> None:
    text: Json = {"messages": ["words and words " * 400]}
    kept = Kept([called(1, request=text) if where == "request" else called(1, answer=text)])
    kept.check()
    assert kept.size(1) < 1000


def test_conversation_comes_back_and_each_turn_adds_what_is_new() -> None:
    kept = Kept(conversation(30))
    kept.check()
    sizes = [kept.size(n) for n in kept.data]
    assert max(sizes) < 1.5 * min(sizes)
    assert sum(sizes) < sum(len(each.call.prompt_ids) for each in kept.spans if each.call) / 5


def test_calls_with_pictures_come_back() -> None:
    heard = called(9, prompt=[1, 2, 3], media=seeing(1, tokens=2)[0].call.media)  # pyright: ignore[reportOptionalMemberAccess]
    Kept([*seeing(4, tokens=16), heard]).check()


def test_call_that_an_earlier_version_stored_is_read() -> None:
    reader = Unpacker(lambda sequence: pytest.fail(f"{sequence} is not shared"), rollout_id="r", number=1)
    request: Json = {"messages": [{"role": "user", "content": "hi"}]}
    expected = called(1, prompt=[1, 2, 3, 70_000], response=[4, 5], request=request, answer={"ok": True})
    assert msgspec.structs.replace(expected, sequence=1) == reader.unpack(bytes.fromhex(STORED), sequence=1)


def test_call_with_a_picture_that_an_earlier_version_stored_is_read() -> None:
    reader = Unpacker(lambda sequence: pytest.fail(f"{sequence} is not shared"), rollout_id="r", number=1)
    (expected,) = seeing(1, tokens=20)
    found = reader.unpack(bytes.fromhex(STORED_WITH_PICTURE), sequence=1)
    assert msgspec.structs.replace(expected, sequence=1) == found


def test_pictures_of_earlier_turns_are_stored_once() -> None:
    kept = Kept(seeing(140, tokens=16))
    kept.check()
    sizes = [kept.size(number) for number in kept.data]
    later = [size for turn, size in enumerate(sizes) if turn % 64]  # a key call has the pictures since the last one
    assert max(later) < 1.2 * sizes[0]


def test_picture_costs_few_bytes_however_many_tokens_stand_for_it() -> None:
    small, large = (Kept(seeing(1, tokens=tokens)).size(1) for tokens in (1, 2000))
    blind = Kept([called(0, prompt=range(20), response=[0, 1], request={"messages": []})]).size(1)

    assert 250 > small - blind
    assert 100 > large - small


def test_text_without_ids_is_shared_too() -> None:
    def turn(number: int) -> Span:
        messages: Json = [{"role": "user", "content": prose(400, seed=n)} for n in range(number)]
        return called(number, response=[7], request={"messages": messages, "seed": number})

    kept = Kept([turn(n) for n in range(1, 20)])
    kept.check()
    assert max(kept.size(n) for n in kept.data) < 2 * kept.size(1)


def test_ids_are_shared_where_the_text_is_another_one() -> None:
    def turn(number: int) -> Span:
        return called(number, prompt=drawn(1000 + number), request={"messages": [prose(300, seed=number)]})

    kept = Kept([turn(n) for n in range(4)])
    kept.check()
    assert max(kept.size(n) for n in (2, 3, 4)) < 1000


def test_answer_of_one_turn_is_shared_with_the_prompt_of_the_next() -> None:
    first, answer = drawn(50), drawn(2000, seed=1)
    kept = Kept([called(1, prompt=first, response=answer), called(2, prompt=[*first, *answer, 7], response=[8])])
    kept.check()
    assert kept.size(1) > 4000
    assert kept.size(2) < 400


@pytest.mark.parametrize(("count", "is_shared"), [(15, False), (16, True), (17, True)])
def test_beginnings_of_64_bytes_are_shared_and_shorter_ones_are_not(count: int, is_shared: bool) -> None:
    kept = Kept([called(1, prompt=drawn(count)), called(2, prompt=[*drawn(count), 7])])
    kept.check()
    kept.read(2)
    assert [1] * is_shared == kept.fetched


def test_text_of_64_bytes_is_shared_with_its_ids() -> None:
    def size(length: int) -> int:
        """Return the size of a second call whose first call has a text of ``length`` bytes."""
        frame = len('{"messages":[""]}')
        text = prose(length - frame)
        kept = Kept(
            [
                called(1, prompt=drawn(50), request={"messages": [text]}),
                called(2, prompt=drawn(51), request={"messages": [text, "more"]}),
            ]
        )
        kept.check()
        return kept.size(2)

    assert size(65) - size(66) > 40


def test_newest_sixteen_calls_of_an_attempt_are_remembered() -> None:
    starts = [drawn(500, seed=n) for n in range(17)]
    again = [called(100 + n, prompt=[*starts[n], 7]) for n in range(17)]
    first_16 = Kept([*(called(n, prompt=starts[n]) for n in range(16)), again[0]])
    assert first_16.size(17) < 600
    all_17 = [called(n, prompt=start) for n, start in enumerate(starts)]
    assert Kept([*all_17, again[0]]).size(18) > 1000
    assert Kept([*all_17, again[1]]).size(18) < 600
    Kept([*all_17, *again]).check()


def test_newest_1024_attempts_are_remembered() -> None:
    def sizes(attempts: int) -> tuple[int, int]:
        """Return the size of a second call in the first attempt, and in the last attempt."""
        packer = Packer()
        first, second = called(1, prompt=drawn(200)), called(2, prompt=[*drawn(200), 7])
        for number in range(attempts):
            packer.pack(first, attempt=number, sequence=1)
        oldest = packer.pack(second, attempt=0, sequence=2)
        return len(oldest), len(packer.pack(second, attempt=attempts - 1, sequence=2))

    small, large = 300, 450
    assert sizes(1024) < (small, small)
    oldest, newest = sizes(1025)
    assert oldest > large
    assert newest < small


def test_calls_with_different_beginnings_share_nothing() -> None:
    draw = random.Random(0)
    spans = [called(n, prompt=[draw.randrange(150_000) for _ in range(200)]) for n in range(3)]
    kept = Kept(spans)
    kept.check()
    kept.read(3)
    assert [] == kept.fetched


def test_prompt_that_forks_within_another_shares_only_its_beginning() -> None:
    base = list(range(1000, 1100))
    prompts = [base, [*base, 7, 8], [*base, 7, 9], base[:50], [*base[:99], 5]]
    Kept([called(n, prompt=prompt, response=[7, 8]) for n, prompt in enumerate(prompts)]).check()


def test_equal_prompts_are_kept_once() -> None:
    prompt = [random.Random(1).randrange(150_000) for _ in range(2000)]
    kept = Kept([called(n, prompt=prompt, response=[n]) for n in range(5)])
    kept.check()
    assert kept.size(1) > 4000
    assert max(kept.size(n) for n in range(2, 6)) < 400


def test_span_is_read_over_the_turns_since_its_key_call_and_over_key_calls() -> None:
    kept = Kept(conversation(200, tokens=20))
    links = [len(kept.fetched) for n in kept.data if kept.read(n)]
    assert [n // 64 + n % 64 for n in range(200)] == links


@pytest.mark.long
def test_key_calls_share_the_beginning_with_the_key_call_before() -> None:
    def turn(number: int) -> Span:
        messages: Json = [prose(9000), *(prose(300, seed=n) for n in range(number))]
        return called(number, prompt=drawn(20 + 3 * number), response=[1], request={"messages": messages})

    kept = Kept([turn(n) for n in range(1, 140)])
    kept.check()
    assert kept.size(1) > 5000
    assert kept.size(65) < 16_000  # it keeps the texts since the first call again, but not the first call's
    assert kept.size(129) < 16_000


def test_attempts_share_nothing_with_each_other() -> None:
    packer = Packer()
    spans = conversation(2)
    packer.pack(spans[0], attempt="r.1", sequence=1)
    other = packer.pack(spans[1], attempt="r.2", sequence=2)
    alone = Unpacker(lambda sequence: pytest.fail(f"{sequence} is of another attempt"), rollout_id="r", number=1)
    assert msgspec.structs.replace(spans[1], sequence=2) == alone.unpack(other, sequence=2)


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_what_is_forgotten_is_shared_no_more(how: str) -> None:
    packer = Packer()
    spans = conversation(3)
    packer.pack(spans[0], attempt="r.1", sequence=1)
    (packer.clear if how == "clear" else lambda: packer.forget("r.1"))()
    packer.forget("never seen")
    data = packer.pack(spans[1], attempt="r.1", sequence=2)
    alone = Unpacker(lambda sequence: pytest.fail(f"{sequence} was forgotten"), rollout_id="r", number=1)
    assert msgspec.structs.replace(spans[1], sequence=2) == alone.unpack(data, sequence=2)


def test_span_that_cannot_be_stored_is_named_and_nothing_is_built_on_it() -> None:
    packer = Packer()
    first, second = conversation(2)
    packer.pack(first, attempt="r.1", sequence=1)
    expected = r"^span 's3' \('n'\) of attempt 'r\.1' cannot be stored: .*; attributes, request and response must be"
    with pytest.raises(StoreError, match=expected):
        packer.pack(called(3, request={"messages": object()}), attempt="r.1", sequence=2)  # pyright: ignore[reportArgumentType]
    data = packer.pack(second, attempt="r.1", sequence=3)
    alone = Unpacker(lambda sequence: pytest.fail(f"{sequence} may not have been kept"), rollout_id="r", number=1)
    assert msgspec.structs.replace(second, sequence=3) == alone.unpack(data, sequence=3)


def test_call_that_refers_to_a_later_one_is_damage(caplog: pytest.LogCaptureFixture) -> None:
    note_damage.cache_clear()
    kept = Kept(conversation(2))
    span = Unpacker(kept.fetch, rollout_id="r", number=1).unpack(kept.data[2], sequence=1)
    assert (semconv.UNREADABLE, "r.1", 1, None) == (span.name, span.attempt_id, span.sequence, span.call)
    assert ("r", "8000000000000001", "error") == (span.rollout_id, span.span_id, span.status)
    assert "the stored span cannot be read (damaged, or of another version of agl)" in span.status_message
    assert span.status_message.endswith(": the call at sequence 1 refers to one at 1")
    loose = Unpacker(kept.fetch, rollout_id="r", number=0).unpack(kept.data[2], sequence=1)
    assert "" == loose.attempt_id
    assert [
        f"span 1 of attempt {of!r} cannot be read (damaged, or of another version of agl)" for of in ("r.1", "r")
    ] == [message.partition(": ")[0] for message in caplog.messages]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), max_size=4), st.booleans(), st.integers(0, 5)),
        min_size=1,
        max_size=40,
    )
)
def test_random_conversations_come_back(steps: list[tuple[int, list[int], bool, int]]) -> None:
    contexts: list[tuple[list[int], list[MediaSpan]]] = [([*range(20)], [])]
    spans: list[Span] = []
    for number, (which, added, has_text, picture) in enumerate(steps):
        ids, seen = contexts[which % len(contexts)]
        processor, digest = f"p{picture // 3}", digest_of(b"%d" % picture)
        media = [*seen, MediaSpan(offset=len(ids), length=1, modality="image", digest=digest)] if picture % 3 else seen
        prompt = [*ids, *[151_655] * (len(media) - len(seen)), *added]
        text: Json = {"messages": [{"content": "x" * 100}, *map(str, prompt)]} if has_text else None
        made = called(number, prompt=prompt, response=[number, 1], request=text, media=media)
        assert made.call is not None
        spans.append(span(number, msgspec.structs.replace(made.call, processor=processor if media else "")))
        contexts.append(([*prompt, number, 1], media))
    Kept(spans).check()


@pytest.mark.parametrize("inputs", [("https://a.b/c.png",), ()], ids=["named only", "without inputs"])
def test_inputs_that_are_no_runs_of_tokens_come_back_in_later_turns(inputs: tuple[str, ...]) -> None:
    turns = seeing(3, tokens=16)
    calls = [
        msgspec.structs.replace(each.call, inputs=(*each.call.inputs[: len(inputs)], *inputs))
        for each in turns
        if each.call
    ]
    Kept([span(number, call) for number, call in enumerate(calls)]).check()


def test_new_spans_become_rows_in_order_and_known_ones_are_left_out() -> None:
    turns = conversation(3)
    other = msgspec.structs.replace(turns[0], attempt_id="r.2")
    given = [span(90), turns[0], other, turns[0], span(91), turns[1], turns[2]]
    looked_up: list[str] = []

    def find(first: Span) -> AttemptSpans:
        looked_up.append(first.attempt_id)
        if first.attempt_id == "r.2":
            return AttemptSpans(key=2, last=0, is_late=False, has=lambda _: False)
        return AttemptSpans(key=1, last=3, is_late=True, has={"s90", "s91"}.__contains__)

    rows, _ = place_spans(given, Packer(), find)

    assert ["r.1", "r.2"] == looked_up
    ids = [each.span_id for each in turns]
    assert [(1, 4, ids[0]), (2, 1, ids[0]), (1, 5, ids[1]), (1, 6, ids[2])] == [row[:3] for row in rows]
    data = {row[1]: row[3] for row in rows if row[0] == 1}
    reader = Unpacker(data.__getitem__, rollout_id="r", number=1)
    expected = [msgspec.structs.replace(each, sequence=n, is_late=True) for n, each in enumerate(turns, start=4)]
    assert expected == [reader.unpack(data[n], sequence=n) for n in data]
    assert len(data[6]) < len(Packer().pack(turns[2], attempt=1, sequence=1)), "later turns share the earlier ones"


def test_span_that_cannot_be_packed_is_refused() -> None:
    packer = Packer()
    bad = called(2, request={"n": object()})  # pyright: ignore[reportArgumentType]  # no JSON
    with pytest.raises(StoreError):
        place_spans([span(1), bad], packer, lambda _: AttemptSpans(key=1, last=0, is_late=False, has=lambda _: False))
