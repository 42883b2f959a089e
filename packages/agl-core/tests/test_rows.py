from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.episodes import attach, build_episode, make_rows, rollout_weights, split_row
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Row, Segment, pack_floats, pack_ids, unpack_floats, unpack_ids
from agl_testing.cases import ATTEMPT, ROLLOUT, agent_span, call_span


def row_of(*parts: tuple[int, int], rollout_id: str = "r") -> Row:
    """A row of (observed, sampled) lengths; logprobs and ids are the positions."""
    mask, segments = bytearray(), []
    for number, (observed, sampled) in enumerate(parts):
        mask += bytes(observed) + b"\x01" * sampled
        segments.append(Segment(start=len(mask) - sampled, stop=len(mask), span_id=f"c{number}"))
    values = [float(i) if is_trained else 0.0 for i, is_trained in enumerate(mask)]
    return Row(
        rollout_id=rollout_id,
        attempt_id=f"{rollout_id}.1",
        group_id="g",
        branch=0,
        ids=pack_ids(range(len(mask))),
        mask=bytes(mask),
        logprobs=pack_floats(values),
        advantages=pack_floats(values),
        segments=tuple(segments),
    )


PARTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12)


def trained(row: Row) -> list[tuple[int, float, float]]:
    values = zip(unpack_ids(row.ids), unpack_floats(row.logprobs), unpack_floats(row.advantages), row.mask, strict=True)
    return [(token, logprob, advantage) for token, logprob, advantage, is_trained in values if is_trained]


@given(PARTS, st.integers(2, 60), st.data())
def test_split_row_trains_every_token_once_with_context(
    parts: list[tuple[int, int]], size: int, data: st.DataObject
) -> None:
    row = row_of(*parts)
    context = data.draw(st.integers(1, size - 1))
    pieces = split_row(row, size, context=context)
    assert trained(row) == [token for piece in pieces for token in trained(piece)]
    for piece in pieces:
        assert len(piece.mask) <= size
        assert 4 * len(piece.mask) == len(piece.ids)
        assert 0 == piece.mask[0]
        assert 1 == piece.mask[-1] or piece is row
        first = unpack_ids(piece.ids)[0]
        assert piece.mask.index(1) >= min(context, first + piece.mask.index(1))
        spans = sorted((s.start, s.stop) for s in piece.segments)
        assert bytes(piece.mask) == bytes(int(any(a <= i < b for a, b in spans)) for i in range(len(piece.mask)))
        hidden = [x for x, m in zip(unpack_floats(piece.logprobs), piece.mask, strict=True) if not m]
        assert [0.0] * len(hidden) == hidden


def test_split_row_keeps_a_call_whole_where_it_fits() -> None:
    pieces = split_row(row_of((4, 4), (2, 6), (2, 6)), 12, context=2)
    assert [["c0"], ["c1"], ["c2"]] == [[s.span_id for s in piece.segments] for piece in pieces]


def trained_parts(pieces: Sequence[Row]) -> list[tuple[list[int], list[tuple[str, int, int]]]]:
    """Per piece its first token and the one behind it, and its calls with what it trains of them; all of the row."""
    found: list[tuple[list[int], list[tuple[str, int, int]]]] = []
    for piece in pieces:
        ids = unpack_ids(piece.ids)
        parts = [(part.span_id, ids[0] + part.start, ids[0] + part.stop) for part in piece.segments]
        found.append(([ids[0], ids[-1] + 1], parts))
    return found


def test_split_row_cuts_a_long_call_with_context_before_each_part() -> None:
    expected = [([2, 10], [("c0", 4, 10)]), ([8, 16], [("c0", 10, 16)]), ([12, 20], [("c0", 16, 20)])]
    assert expected == trained_parts(split_row(row_of((4, 16)), 8, context=2))
    assert expected == trained_parts(split_row(row_of((4, 16)), 8))


def test_split_row_by_default_repeats_a_quarter_and_at_least_one_token() -> None:
    assert [[1, 4], [3, 6]] == [ids for ids, _ in trained_parts(split_row(row_of((2, 4)), 3))]
    assert split_row(row_of((9, 30)), 12, context=3) == split_row(row_of((9, 30)), 12)


def test_split_row_fills_a_piece_to_its_last_token() -> None:
    pieces = split_row(row_of((2, 2), (2, 2), (2, 2), (2, 2)), 8, context=2)
    expected = [([0, 8], [("c0", 2, 4), ("c1", 6, 8)]), ([8, 16], [("c2", 10, 12), ("c3", 14, 16)])]
    assert expected == trained_parts(pieces)


def test_split_row_returns_a_row_that_fits_as_it_is() -> None:
    row = row_of((2, 2))
    (piece,) = split_row(row, 4)
    assert row is piece


def test_split_row_without_advantages_has_none() -> None:
    episode = build_episode(ROLLOUT, ATTEMPT, [call_span(1, prompt=(1, 2, 3), response=tuple(range(10)))])
    pieces = split_row(episode.rows[0], 6)
    assert [b""] * len(pieces) == [piece.advantages for piece in pieces]
    assert 10 == sum(piece.mask.count(1) for piece in pieces)


@pytest.mark.parametrize(("size", "context"), [(1, None), (8, 0), (8, 8)])
def test_split_row_refuses_sizes_without_room(size: int, context: int | None) -> None:
    kept = 1 if context is None else context
    expected = rf"max_tokens={size} and context={kept}; choose a context of at least 1 token, .* below max_tokens$"
    with pytest.raises(ConfigError, match=expected):
        split_row(row_of((2, 20)), size, context=context)


@pytest.mark.parametrize("aggregation", ["rollout", "token"])
@given(rollouts=st.lists(PARTS, min_size=1, max_size=4), size=st.integers(2, 30))
def test_weights_give_a_rollout_the_same_gradient_mass_however_it_is_split(
    aggregation: str, rollouts: list[list[tuple[int, int]]], size: int
) -> None:
    whole = [row_of(*parts, rollout_id=f"r{i}") for i, parts in enumerate(rollouts)]
    split = [piece for row in whole for piece in split_row(row, size)]

    def gradient(rows: list[Row]) -> dict[str, float]:
        """The share of each rollout in a loss whose per-token terms are the advantages."""
        found: dict[str, float] = {}
        weights = rollout_weights(rows, aggregation=aggregation)  # pyright: ignore[reportArgumentType]  # parametrized
        for row, weight in zip(rows, weights, strict=True):
            found[row.rollout_id] = found.get(row.rollout_id, 0.0) + weight * sum(a for _, _, a in trained(row))
        return found

    assert gradient(whole) == pytest.approx(gradient(split))


def test_weights_of_rollouts_are_equal_and_of_tokens_by_length() -> None:
    rows = [row_of((1, 1), (1, 1), rollout_id="a"), row_of((1, 2), rollout_id="a"), row_of((1, 12), rollout_id="b")]
    assert pytest.approx([1 / 8, 1 / 8, 1 / 24]) == rollout_weights(rows)
    assert pytest.approx([1 / 16] * 3) == rollout_weights(rows, aggregation="token")
    assert pytest.approx([1 / 16, 1 / 16, 1 / 48]) == rollout_weights(rows, rollouts=4)


def test_weights_of_rows_without_a_sampled_token_are_zero() -> None:
    rows = [row_of((1, 2), rollout_id="a"), row_of((3, 0), rollout_id="b"), row_of((3, 0), rollout_id="a")]
    assert [1 / 4, 0.0, 0.0] == rollout_weights(rows)
    assert [1 / 2, 0.0, 0.0] == rollout_weights(rows, aggregation="token")


def episode_of_two_turns() -> Episode:
    spans = [call_span(1, prompt=(1, 2), response=(3,)), call_span(2, prompt=(1, 2, 3, 4), response=(5, 6))]
    return build_episode(ROLLOUT, ATTEMPT, spans)


def test_attach_puts_each_calls_value_on_its_tokens() -> None:
    credits = [CallCredit(span_id="c1", value=0.5, baseline="g"), CallCredit(span_id="c2", value=-1.0, baseline="g")]
    (row,) = attach(episode_of_two_turns(), credits)
    assert [0.0, 0.0, 0.5, 0.0, -1.0, -1.0] == unpack_floats(row.advantages)


def test_attach_leaves_every_other_token_at_zero() -> None:
    spans = [call_span(1, prompt=(1,), response=tuple(range(5))), call_span(2, prompt=(1, *range(5), 7, 8))]
    credits = [CallCredit(span_id=f"c{n}", value=float(n), baseline="g") for n in (1, 2)]
    (row,) = attach(build_episode(ROLLOUT, ATTEMPT, spans), credits)
    assert [0.0, *[1.0] * 5, 0.0, 0.0, 2.0] == unpack_floats(row.advantages)


def test_rows_are_described_by_their_last_call_and_their_segments() -> None:
    spans = [
        agent_span("a"),
        call_span(1, prompt=(1, 2), response=(3,), parent="a", model_version="v1"),
        call_span(2, prompt=(9,), response=(8,)),
        call_span(3, prompt=(1, 2, 3, 4), response=(5, 6), model_version="v2"),
    ]
    first, second = make_rows(build_episode(ROLLOUT, ATTEMPT, spans).transitions, group_id="group")
    assert ("r", "r.1", "group", 0) == (first.rollout_id, first.attempt_id, first.group_id, first.branch)
    assert (1, 2, 3, 4, 5, 6) == tuple(unpack_ids(first.ids))
    assert b"\x00\x00\x01\x00\x01\x01" == first.mask
    assert [0.0, 0.0, -1.0, 0.0, -3.0, -3.25] == unpack_floats(first.logprobs)
    assert (
        Segment(start=2, stop=3, span_id="c1", agent="a", model_version="v1"),
        Segment(start=4, stop=6, span_id="c3", agent="", model_version="v2"),
    ) == first.segments
    assert (1, (Segment(start=1, stop=2, span_id="c2"),)) == (second.branch, second.segments)


def test_rejected_calls_are_in_no_row() -> None:
    transitions = build_episode(ROLLOUT, ATTEMPT, [call_span(1, is_complete=False), call_span(2)]).transitions
    (row,) = make_rows(transitions, group_id="g")
    assert ["c2"] == [segment.span_id for segment in row.segments]


def test_attach_refuses_a_call_without_credit() -> None:
    expected = "no value for call c2 of rollout r; it must return one CallCredit for every call that is not rejected$"
    with pytest.raises(ConfigError, match=expected):
        attach(episode_of_two_turns(), [CallCredit(span_id="c1", value=0.5, baseline="g")])
