"""Any recorded rollout is restored from an archive byte for byte."""

import asyncio
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.contracts import Recording
from agl.schemas import Attempt, ModelCall, Reward, Rollout, Span, SpanEvent, decode, encode, from_json
from agl.stores import MemoryStore, read_recordings
from agl_data.archive.arrow import integer, json_text, micros, micros_of_ns
from agl_data.archive.layout import Folder
from agl_data.archive.parts import PartReader, PartWriter, content_of
from agl_data.archive.places import Place

from .conftest import ALL, archive, restore

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
FLOATS = st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)
PACKED = st.binary(max_size=16)
CALLS = st.builds(
    ModelCall,
    request_id=TEXTS,
    dialect=st.sampled_from(["chat", "messages"]),
    model=TEXTS,
    request=VALUES,
    response=VALUES,
    prompt_ids=PACKED,
    response_ids=PACKED,
    logprobs=PACKED,
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
REWARDS = st.builds(Reward, value=st.none() | FINITE, dimensions=st.dictionaries(TEXTS, FINITE, max_size=2))
TIMES = st.integers(0, (1 << 63) - 1)
EVENTS = st.lists(st.builds(SpanEvent, name=TEXTS, time_ns=TIMES, attributes=OBJECTS), max_size=2).map(tuple)


@st.composite
def recordings(draw: Callable[..., Any]) -> list[Recording]:
    return [draw(recording(number)) for number in range(draw(st.integers(1, 3)))]


@st.composite
def recording(draw: Callable[..., Any], number: int) -> Recording:
    rollout_id = f"r{number}"
    count = draw(st.integers(0, 2))
    attempts = [
        Attempt(
            attempt_id=f"{rollout_id}.{each}",
            rollout_id=rollout_id,
            number=each,
            worker=draw(TEXTS),
            status="succeeded" if each == count else "failed",
            finished_at=2.0,
        )
        for each in range(1, count + 1)
    ]
    rollout = Rollout(
        rollout_id=rollout_id,
        task=draw(VALUES),
        metadata=draw(OBJECTS),
        experiment="x",
        status="succeeded" if count else "cancelled",
        attempts=count,
        attempt_id=attempts[-1].attempt_id if attempts else None,
        finished_at=draw(st.floats(0.5, 1e9)),
    )
    owners = [attempt.attempt_id for attempt in attempts]
    spans = [
        Span(
            rollout_id=rollout_id,
            attempt_id=owner,
            span_id=f"{each:016x}",
            sequence=each,
            name=draw(TEXTS),
            start_ns=draw(TIMES),
            end_ns=draw(TIMES),
            attributes=draw(OBJECTS),
            events=draw(EVENTS),
            call=draw(st.none() | CALLS),
            reward=draw(st.none() | REWARDS),
        )
        for owner in owners
        for each in range(1, draw(st.integers(0, 2)) + 1)
    ]
    return decode(encode(Recording(rollout=rollout, attempts=attempts, spans=spans)), Recording)


@settings(max_examples=20)
@given(recordings())
def test_a_part_gives_back_what_was_written(written):
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Place(path), "x")
        with PartWriter(folder, "x", writer="w") as writer:
            for each in written:
                writer.add(each)
            manifest = writer.upload()
        with PartReader(folder, manifest) as reader:
            assert [content_of(each) for each in written] == [content_of(each) for each in reader.recordings()]


@pytest.mark.long
@settings(max_examples=15)
@given(recordings())
def test_a_store_gets_back_what_it_had(written):
    async def held(store: MemoryStore) -> list[bytes]:
        return [content_of(each) async for each in read_recordings(store, ALL, spans="all")]

    async def work(url: str) -> None:
        store = MemoryStore()
        await store.restore(written)
        before = await held(store)
        done = await archive(store, url, is_removing=True)
        assert (len(written), []) == (done.removed, done.changed)
        await restore(store, url)
        assert before == await held(store)

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(work(path))


@given(VALUES)
def test_a_text_of_json_is_exact_only_where_it_gives_the_value_back(value):
    text, is_exact = json_text(value)
    assert isinstance(text, str)
    if is_exact:
        assert encode(value) == encode(from_json(text, object))


def test_times_and_integers_that_no_column_takes_are_left_out():
    assert (None, None, 1_500_000) == (micros(0.0), micros(float("inf")), micros(1.5))
    assert (None, 1, None) == (micros_of_ns(0), micros_of_ns(1_999), micros_of_ns(1 << 80))
    assert (1, None, None, None) == (integer(1), integer(True), integer(1 << 63), integer("1"))
