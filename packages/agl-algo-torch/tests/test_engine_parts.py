"""Property tests of the parts of the engine: the cache of a batch, shared prefixes, and growing text."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_algo_torch.serving.codec import cut_at_stop, safe_length
from agl_algo_torch.serving.kvcache import BatchCache, CacheLayout, KeyValues
from agl_algo_torch.serving.prefixes import PrefixStore
from agl_algo_torch.serving.toolcalls import ParsedResponse, ParsedToolCall, find_parser

LAYOUT = CacheLayout(
    stores=((3, 2, 4), (1, 2, 6)),
    places=(((0, 0), (0, 1)), ((0, 2), (1, 0))),
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def key_values(numbers: list[int]) -> KeyValues:
    """Return keys and values of one row in which token `i` has `numbers[i]` everywhere."""
    column = torch.tensor(numbers, dtype=torch.float32)[:, None]
    return [column.expand(count, heads, len(numbers), dim) for count, heads, dim in LAYOUT.stores]


def held(cache: BatchCache) -> list[list[int]]:
    rows: list[list[int]] = []
    for row, length in enumerate(cache.lengths):
        views = cache.row(row, tokens=length)
        for view in views:
            assert torch.equal(view, view[:1, :1, :, :1].expand_as(view))
        rows.append(views[0][0, 0, :, 0].to(int).tolist())
    return rows


def step(cache: BatchCache, numbers: list[int]) -> None:
    """Run a model's forward pass with one new token per row."""
    cache.reserve(1)
    column = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None]
    for layer, (k, v) in enumerate(LAYOUT.places):
        cache.update(
            column.expand(-1, LAYOUT.stores[k[0]][1], 1, LAYOUT.stores[k[0]][2]),
            column.expand(-1, LAYOUT.stores[v[0]][1], 1, LAYOUT.stores[v[0]][2]),
            layer,
        )
    cache.advance(1)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(1, 99), min_size=1, max_size=40)),
        st.tuples(st.just("remove"), st.integers(0, 99)),
        st.tuples(st.just("step"), st.integers(1, 30)),
    ),
    max_size=30,
)


@given(operations)
def test_batch_cache_holds_what_a_list_of_lists_would(todo: list[tuple[str, object]]) -> None:
    cache = BatchCache(LAYOUT)
    model: list[list[int]] = []
    for what, value in todo:
        if what == "add" and isinstance(value, list):
            cut = len(value) // 2
            cache.add([key_values(part) for part in (value[:cut], value[cut:]) if part])
            model.append(list(value))
        elif what == "remove" and model and isinstance(value, int):
            row = value % len(model)
            cache.remove(row)
            last = model.pop()
            if row < len(model):
                model[row] = last
        elif what == "step" and model and isinstance(value, int):
            for _ in range(value):
                numbers = [(value + i) % 90 + 1 for i in range(len(model))]
                step(cache, numbers)
                for row, number in zip(model, numbers, strict=True):
                    row.append(number)
        assert model == held(cache)
        assert max(map(len, model), default=0) == cache.width


def cells(cache: BatchCache) -> int:
    return sum(store[:, :, 0, :, 0].numel() for store in cache._stores) // sum(count for count, *_ in LAYOUT.stores)


def test_batch_cache_that_had_many_short_rows_takes_no_memory_for_as_many_long_ones() -> None:
    scratch, batch = BatchCache(LAYOUT), BatchCache(LAYOUT)
    scratch.begin([None] * 64, new_tokens=20)
    for number in range(64):
        batch.add([key_values([number + 1] * 20)])
    while len(batch.lengths) > 3:
        batch.remove(0)

    scratch.begin([None], new_tokens=5000)
    batch.add([key_values([7] * 5000)])

    assert 5000 == cells(scratch)
    assert cells(batch) <= 4 * 4 * (5000 + 256)
    assert [20, 20, 20, 5000] == batch.lengths
    assert [7] * 5000 == held(batch)[3]


def test_batch_cache_that_begins_with_rows_of_changing_shapes_uses_its_memory_again() -> None:
    cache = BatchCache(LAYOUT)
    for rows, tokens in ((8, 100), (10, 90), (5, 160)):
        cache.begin([None] * rows, new_tokens=tokens)
    stores = cache._stores
    for rows, tokens in ((10, 160), (3, 150), (8, 100), (1, 160)):
        cache.begin([None] * rows, new_tokens=tokens)
    assert cache._stores is stores


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 300)), min_size=1, max_size=20))
def test_batch_cache_keeps_at_most_four_times_what_it_needed(shapes: list[tuple[int, int]]) -> None:
    cache = BatchCache(LAYOUT)
    for done, (rows, tokens) in enumerate(shapes, start=1):
        cache.begin([None] * rows, new_tokens=tokens)
        assert rows * tokens <= cells(cache) <= 4 * max(one * other for one, other in shapes[:done])


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), min_size=1, max_size=12), st.data())
def test_prefix_store_never_gives_what_is_no_prefix(sequences: list[list[int]], data: st.DataObject) -> None:
    store = PrefixStore(max_bytes=200_000)
    arrays = [np.array(sequence, dtype=np.int32) for sequence in sequences]
    for array in arrays:
        store.add(array, key_values(array.tolist()))
    wanted = data.draw(st.sampled_from(sequences)) + data.draw(st.lists(st.integers(0, 1), max_size=20))
    shared, found = store.find(np.array(wanted, dtype=np.int32))
    assert shared < len(wanted)
    if found is not None:
        assert wanted[:shared] == found[0][0, 0, :, 0].to(int).tolist()


def test_prefix_store_finds_the_longest_and_forgets_the_oldest() -> None:
    long = np.arange(64, dtype=np.int32)
    n_bytes = sum(t.numel() * 4 for t in key_values(long.tolist()))
    store = PrefixStore(max_bytes=2 * n_bytes)
    store.add(long[:32], key_values(long[:32].tolist()))
    store.add(long, key_values(long.tolist()))
    assert 63 == store.find(long)[0]
    assert 64 == store.find(np.append(long, 7).astype(np.int32))[0]
    store.add(long + 100, key_values(long.tolist()))
    store.add(long + 200, key_values(long.tolist()))
    assert (0, None) == store.find(long)
    store.clear()
    assert (0, None) == store.find(long + 200)


texts = st.text(alphabet="abX\n", max_size=30)


@given(texts, st.lists(st.text(alphabet="abX", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5)))
def test_text_sent_early_is_always_a_prefix_of_the_final_text(text: str, stops: list[str], sizes: list[int]) -> None:
    seen, pieces = "", list[str]()
    for size in [*sizes, len(text)]:
        seen = text[: len(seen) + size]
        pieces.append(seen[: safe_length(seen, stops)])
        if any(stop in seen for stop in stops):
            break  # the engine draws no more tokens
    final = cut_at_stop(seen, stops)
    for piece in pieces:
        assert final.startswith(piece)


def parse(text: str) -> ParsedResponse:
    return find_parser("hermes").parse(text, [])


def test_a_hermes_call_is_read_with_its_content() -> None:
    call = '<tool_call>\n{"name": "calc", "arguments": {"e": "7*8", "b": "ü"}}\n</tool_call>'
    expected = ParsedToolCall("calc", '{"e": "7*8", "b": "ü"}')
    assert ParsedResponse(None, (expected,)) == parse(call)
    assert ParsedResponse("Let me see.", (expected, expected)) == parse(f"Let me see.\n{call}\n{call}")
    assert ParsedResponse("one two", (expected,)) == parse(f"one {call}two")


def test_a_malformed_call_stays_content() -> None:
    for text in (
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "calc", "arguments": {}}',
        '<tool_call>{"name": "calc", "arguments": "7"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        'ok <tool_call>{"name": "calc", "arguments": {}}</tool_call><tool_call>?</tool_call>',
    ):
        assert ParsedResponse(text) == parse(text)
