"""Spans as the bytes that a store keeps: whole when they are read, and small when calls share their prompts."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.errors import StoreError
from agl.schemas import Json, ModelCall, Span, pack_ids
from agl.stores import Packer, Unpacker


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
    )
    return span(number, call)


class Kept:
    """What a store keeps of one attempt, by sequence from 1."""

    def __init__(self, spans: Sequence[Span], *, attempt: object = "r.1") -> None:
        self.spans = list(spans)
        packer = Packer()
        self.data = {n: packer.pack(each, attempt=attempt, sequence=n) for n, each in enumerate(spans, start=1)}
        self.fetched: list[int] = []

    def fetch(self, sequence: int) -> bytes:
        self.fetched.append(sequence)
        return self.data[sequence]

    def read(self, *sequences: int) -> list[Span]:
        """Those spans, by one reader."""
        self.fetched.clear()
        reader = Unpacker(self.fetch)
        return [reader.unpack(self.data[n], sequence=n) for n in sequences]

    def size(self, sequence: int) -> int:
        return len(self.data[sequence])

    def check(self) -> None:
        """All spans come back as they were, read in order, backwards, and each by a reader of its own."""
        expected = [msgspec.structs.replace(each, sequence=n) for n, each in enumerate(self.spans, start=1)]
        assert expected == self.read(*self.data)
        assert [] == self.fetched
        assert expected[::-1] == self.read(*reversed(self.data))
        assert expected == [self.read(n)[0] for n in self.data]


def conversation(turns: int, *, tokens: int = 100) -> list[Span]:
    """Turns of one agent: every prompt is the one before with its answer and a new question."""
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


@pytest.mark.parametrize("ids", [(0,), (1, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1), tuple(range(70_000, 70_300))])
def test_ids_of_every_size_come_back(ids: tuple[int, ...]) -> None:
    Kept([called(1, prompt=ids, response=ids[::-1]), called(2, prompt=ids[::-1]), called(3, response=ids)]).check()


def test_ids_that_are_no_whole_numbers_come_back() -> None:
    Kept([called(1, prompt=b"12345", response=b"123"), called(2, prompt=b"1234567", response=b"")]).check()


def test_conversation_comes_back_and_each_turn_adds_what_is_new() -> None:
    kept = Kept(conversation(30))
    kept.check()
    sizes = [kept.size(n) for n in kept.data]
    assert max(sizes) < 1.5 * min(sizes)
    assert sum(sizes) < sum(len(each.call.prompt_ids) for each in kept.spans if each.call) / 5


def test_text_without_ids_is_shared_too() -> None:
    def turn(number: int) -> Span:
        messages: Json = [
            {"role": "user", "content": f"{n} " + str(random.Random(n).random()) * 20} for n in range(number)
        ]
        return called(number, request={"messages": messages, "seed": number})

    kept = Kept([turn(n) for n in range(1, 20)])
    kept.check()
    assert max(kept.size(n) for n in kept.data) < 2 * kept.size(1)


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


def test_one_span_is_read_over_few_others_however_long_its_conversation_is() -> None:
    kept = Kept(conversation(400, tokens=3))
    expected = msgspec.structs.replace(kept.spans[-1], sequence=400)
    assert [expected] == kept.read(400)
    assert 0 < len(kept.fetched) <= 64 + 400 // 64
    assert len(kept.fetched) == len(set(kept.fetched))


def test_whole_attempt_fetches_nothing_that_was_read_before() -> None:
    kept = Kept(conversation(130, tokens=3))
    kept.check()


def test_attempts_share_nothing_with_each_other() -> None:
    packer = Packer()
    spans = conversation(2)
    packer.pack(spans[0], attempt="r.1", sequence=1)
    other = packer.pack(spans[1], attempt="r.2", sequence=2)
    alone = Unpacker(lambda sequence: pytest.fail(f"{sequence} is of another attempt"))
    assert msgspec.structs.replace(spans[1], sequence=2) == alone.unpack(other, sequence=2)


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_what_is_forgotten_is_shared_no_more(how: str) -> None:
    packer = Packer()
    spans = conversation(3)
    packer.pack(spans[0], attempt="r.1", sequence=1)
    (packer.clear if how == "clear" else lambda: packer.forget("r.1"))()
    packer.forget("never seen")
    data = packer.pack(spans[1], attempt="r.1", sequence=2)
    alone = Unpacker(lambda sequence: pytest.fail(f"{sequence} was forgotten"))
    assert msgspec.structs.replace(spans[1], sequence=2) == alone.unpack(data, sequence=2)


def test_span_that_cannot_be_stored_is_named_and_nothing_is_built_on_it() -> None:
    packer = Packer()
    first, second = conversation(2)
    packer.pack(first, attempt="r.1", sequence=1)
    expected = r"^span 's3' \('n'\) of attempt 'r\.1' cannot be stored: .*; attributes, request and response must be"
    with pytest.raises(StoreError, match=expected):
        packer.pack(called(3, request={"messages": object()}), attempt="r.1", sequence=2)  # pyright: ignore[reportArgumentType]
    data = packer.pack(second, attempt="r.1", sequence=3)
    alone = Unpacker(lambda sequence: pytest.fail(f"{sequence} may not have been kept"))
    assert msgspec.structs.replace(second, sequence=3) == alone.unpack(data, sequence=3)


def test_call_that_refers_to_a_later_one_is_damage() -> None:
    kept = Kept(conversation(2))
    with pytest.raises(StoreError, match=r"damaged: the call at sequence 1 of span 's1' refers to one at 1; delete"):
        Unpacker(kept.fetch).unpack(kept.data[2], sequence=1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), max_size=4), st.booleans()), min_size=1, max_size=40
    )
)
def test_random_conversations_come_back(steps: list[tuple[int, list[int], bool]]) -> None:
    contexts: list[list[int]] = [[*range(20)]]
    spans: list[Span] = []
    for number, (which, added, has_text) in enumerate(steps):
        prompt = [*contexts[which % len(contexts)], *added]
        text: Json = {"messages": [{"content": "x" * 100}, *map(str, prompt)]} if has_text else None
        spans.append(called(number, prompt=prompt, response=[number, 1], request=text))
        contexts.append([*prompt, number, 1])
    Kept(spans).check()
