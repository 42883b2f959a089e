import pytest

from agl.episodes import attach, build_episode
from agl.episodes._rows import make_rows
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Segment, unpack_floats, unpack_ids
from tests.cases import ATTEMPT, ROLLOUT, agent_span, call_span


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
