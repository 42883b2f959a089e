from agl.episodes import build_episode
from agl.episodes._transitions import make_rows
from agl.schemas import Segment, unpack_floats, unpack_ids
from tests.cases import ATTEMPT, ROLLOUT, agent_span, call_span


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
