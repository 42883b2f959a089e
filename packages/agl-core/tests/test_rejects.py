"""The reject reason of a call that trains nothing: one reason each, with details as text."""

import pytest

from agl import semconv
from agl.episodes import Enclosing, Reject, is_answered
from agl.episodes._rejects import find_rejects
from agl.errors import ConfigError
from agl.schemas import ModelCall, Span
from tests.cases import agent_span, call_span, plain_span

UNFIT: dict[str, object] = {"ids_missing": "none", "inputs": ("sha256:1",), "is_complete": False, "error": "boom"}
"""Fields of a call with all defects at once."""


def found(
    *spans: Span, attempt_id: str | None = "r.1", agent_match: str | None = None, policy: str | None = None
) -> dict[str, Reject]:
    """Return the rejects of the calls among the spans, by span id."""
    enclosing = Enclosing(spans)
    calls = [span for span in spans if span.call is not None]
    who = {span.span_id: enclosing.who(span) for span in calls}
    rejects = find_rejects(calls, attempt_id=attempt_id, agent_match=agent_match, policy=policy, who=who)
    return {calls[index].span_id: reject for index, reject in rejects.items()}


def reject_of(**call: object) -> tuple[str, str]:
    (reject,) = found(call_span(1, **call)).values()  # pyright: ignore[reportArgumentType]  # a test's shorthand
    return reject.reason, reject.detail


def superseded_by(winner: str) -> Reject:
    return Reject(reason="superseded", detail=f"the client retried the request; call {winner} answered it")


def test_good_call_has_no_reject() -> None:
    assert {} == found(call_span(1))
    assert {} == found()


def test_span_without_a_call_is_passed_over() -> None:
    rejects = find_rejects(
        [agent_span("a"), call_span(1, response=())],
        attempt_id="r.1",
        agent_match=None,
        policy=None,
        who={"c1": Enclosing([]).who(call_span(1))},
    )
    assert {1: Reject(reason="empty_response", detail="the model sampled no token")} == rejects


@pytest.mark.parametrize(
    ("call", "reason", "detail"),
    [
        ({"attempt_id": "r.0", "is_late": True}, "not_final", "attempt r.0 did not decide the rollout"),
        ({"is_late": True, **UNFIT}, "late", "recorded after the attempt was decided"),
        ({"dialect": "embeddings", **UNFIT}, "not_selected", "an embeddings call samples no tokens"),
        ({**UNFIT}, "error", "HTTP status 200: boom"),
        ({"status_code": 500}, "error", "HTTP status 500"),
        ({"status_code": 400}, "error", "HTTP status 400"),
        ({"status_code": 199}, "error", "HTTP status 199"),
        ({"status_code": 0}, "error", "no response"),
        ({"status_code": 0, "error": "refused"}, "error", "no response: refused"),
        ({**UNFIT, "error": ""}, "incomplete", "the answer was cut at token 1"),
        ({**UNFIT, "error": "", "is_complete": True}, "non_token_input", "1 inputs are not tokens: sha256:1"),
        ({"inputs": ("a", "b")}, "non_token_input", "2 inputs are not tokens: a"),
        ({"ids_missing": "the backend has none", "prompt": ()}, "missing_token_ids", "the backend has none"),
        ({"prompt": (), "response": ()}, "missing_token_ids", "the record has no prompt ids"),
        ({"prompt_ids": b"12345", "response": ()}, "empty_response", "the model sampled no token"),
        (
            {"prompt_ids": b"12345", "logprobs": b""},
            "length_mismatch",
            "packed ids of 5 and 4 bytes are not whole int32 numbers",
        ),
        (
            {"response_ids": b"123456", "logprobs": b""},
            "length_mismatch",
            "packed ids of 4 and 6 bytes are not whole int32 numbers",
        ),
        ({"response": (2, 3), "logprobs": b"12345678abcd"}, "length_mismatch", "2 response ids, 3 log-probabilities"),
        ({"logprobs": b""}, "length_mismatch", "1 response ids, 0 log-probabilities"),
    ],
)
def test_first_reason_that_applies_is_given(call: dict[str, object], reason: str, detail: str) -> None:
    assert (reason, detail) == reject_of(**call)


@pytest.mark.parametrize("status", [200, 302, 399])
def test_statuses_of_answers_are_no_error(status: int) -> None:
    assert {} == found(call_span(1, status_code=status))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, True),
        ({"status_code": 399}, True),
        ({"status_code": 400}, False),
        ({"status_code": 199}, False),
        ({"error": "boom"}, False),
        ({"is_complete": False}, False),
    ],
)
def test_call_is_answered_when_the_whole_answer_came(call: dict[str, object], expected: bool) -> None:
    span = call_span(1, **call)  # pyright: ignore[reportArgumentType]  # parametrized
    assert isinstance(span.call, ModelCall)
    assert expected is is_answered(span.call)


def test_attempt_that_nobody_started_decides_nothing() -> None:
    assert {"c1": Reject(reason="not_final", detail="attempt r.1 did not decide the rollout")} == found(
        call_span(1), attempt_id=None
    )


def test_policy_says_who_served_the_call() -> None:
    spans = [call_span(1, policy="q"), call_span(2, policy="", model="gpt"), call_span(3, policy="p")]
    assert {
        "c1": Reject(reason="not_selected", detail="policy 'q' served it, not 'p'"),
        "c2": Reject(reason="not_selected", detail="model 'gpt', which is not a configured policy, served it, not 'p'"),
    } == found(*spans, policy="p")


def test_agent_match_says_whose_call_it_is() -> None:
    tool = plain_span("t", parent="a", attributes={"gen_ai.tool.name": "search"})
    spans = [agent_span("a"), tool, call_span(1, parent="a"), call_span(2), call_span(3, parent="t")]
    assert {
        "c1": Reject(reason="not_selected", detail="agent_match 'search' does not select agent 'a'"),
        "c2": Reject(reason="not_selected", detail="agent_match 'search' does not select a call without an agent"),
    } == found(*spans, agent_match="search")
    assert {} == found(*spans[:3], agent_match="a")


def test_helper_call_trains_where_it_is_selected_by_that_name_alone() -> None:
    helper = call_span(1, parent="codex", attributes={semconv.ROLE: semconv.HELPER})
    spans = [agent_span("codex"), helper, call_span(2, parent="codex")]
    detail = "a helper call of 'codex', such as one for a title; agents = 'helper-call' selects these"
    expected = Reject(reason="not_selected", detail=detail)
    assert {"c1": expected} == found(*spans)
    assert {"c1": expected} == found(*spans, agent_match="codex")
    unmatched = Reject(reason="not_selected", detail="agent_match '^helper-call$' does not select agent 'codex'")
    assert {"c2": unmatched} == found(*spans, agent_match="^helper-call$")


def test_agent_match_that_is_no_expression_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"agent_match = '\(' is not a regular expression: .*; escape special"):
        found(call_span(1), agent_match="(")


def test_last_complete_exchange_of_a_request_is_the_one_that_trains() -> None:
    spans = [
        call_span(1, request_id="x"),
        call_span(2, request_id="y"),
        call_span(3, request_id="x", retry_count=1),
        call_span(4, request_id="x", retry_count=2, status_code=500),
    ]
    assert {"c1": superseded_by("c3"), "c4": superseded_by("c3")} == found(*spans)


def test_first_exchange_that_is_complete_may_be_a_failed_ones_retry() -> None:
    spans = [call_span(1, request_id="x", status_code=500), call_span(2, request_id="x", retry_count=1)]
    assert {"c1": superseded_by("c2")} == found(*spans)
    assert {"c2": superseded_by("c1")} == found(
        call_span(1, request_id="x"), call_span(2, request_id="x", retry_count=1, is_complete=False)
    )


def test_exchange_that_came_late_supersedes_nothing() -> None:
    spans = [
        call_span(1, request_id="x"),
        call_span(2, request_id="x", retry_count=1, is_late=True),
        call_span(3, request_id="x", retry_count=2, is_complete=False),
    ]
    late = Reject(reason="late", detail="recorded after the attempt was decided")
    assert {"c2": late, "c3": superseded_by("c1")} == found(*spans)


def test_choices_of_the_winning_exchange_all_train_and_a_cut_one_keeps_its_reason() -> None:
    cut = Reject(reason="incomplete", detail="the answer was cut at token 1")
    spans = [
        call_span(1, request_id="x", choice=0, is_complete=False),
        call_span(2, request_id="x", choice=1),
        call_span(3, request_id="x", choice=2),
    ]
    assert {"c1": cut} == found(*spans)
    earlier = call_span(9, request_id="x", choice=0, is_complete=False)
    later = [
        call_span(11, request_id="x", retry_count=1, choice=0),
        call_span(12, request_id="x", retry_count=1, choice=1, is_complete=False),
    ]
    assert {"c9": superseded_by("c11"), "c12": cut} == found(earlier, *later)


def test_winner_that_is_named_is_the_last_choice() -> None:
    spans = [
        call_span(1, request_id="x"),
        call_span(2, request_id="x", retry_count=1, choice=0),
        call_span(3, request_id="x", retry_count=1, choice=1),
    ]
    assert {"c1": superseded_by("c3")} == found(*spans)


def test_choice_that_was_answered_twice_trains_once() -> None:
    spans = [call_span(1, request_id="x"), call_span(2, request_id="x")]
    assert {"c1": superseded_by("c2")} == found(*spans)


def test_requests_of_two_attempts_do_not_supersede_each_other() -> None:
    other = Reject(reason="not_final", detail="attempt r.2 did not decide the rollout")
    spans = [call_span(1, request_id="x"), call_span(2, request_id="x", attempt_id="r.2", retry_count=1)]
    assert {"c2": other} == found(*spans)


def test_calls_without_a_request_are_no_retries_of_each_other() -> None:
    assert {} == found(
        call_span(1, request_id=""),
        call_span(2, request_id="", retry_count=1),
        call_span(3, request_id="x"),
        call_span(4, request_id="y"),
    )


def test_request_in_which_nothing_was_complete_keeps_each_reason() -> None:
    spans = [
        call_span(1, request_id="x", status_code=429),
        call_span(2, request_id="x", retry_count=1, is_complete=False),
    ]
    assert ["error", "incomplete"] == [reject.reason for reject in found(*spans).values()]
