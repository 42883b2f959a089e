"""Compare the model calls that the tracer saw with the recorded ones, and report the difference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv
from agl.episodes._agreement import find_disagreement
from agl.episodes._transitions import EpisodeOptions, build_episode
from agl.schemas import Attempt, Dialect, ModelCall, Rollout, Span, pack_floats, pack_ids

ATTEMPT = Attempt(attempt_id="r.1", rollout_id="r", number=1, status="succeeded", worker="w")
ROLLOUT = Rollout(rollout_id="r", task={}, status="succeeded", attempt_id="r.1")


def span(span_id: str, parent: str | None = "root", start: int = 1, end: int = 9, **fields: object) -> Span:
    settings = {"name": span_id, "attributes": {}, **fields}
    return Span(
        rollout_id="r", attempt_id="r.1", span_id=span_id, parent_id=parent, start_ns=start, end_ns=end, **settings
    )  # type: ignore[arg-type]


def root() -> Span:
    return span("root", None, name=semconv.ROOT_SPAN_NAME)


def framework(span_id: str, operation: str = "chat", parent: str = "root", **fields: object) -> Span:
    more = fields.pop("attributes", {})
    return span(span_id, parent, attributes={semconv.OPERATION: operation, **more}, **fields)  # type: ignore[dict-item]


def recorded(
    span_id: str, framework_id: str = "", parent: str | None = "root", dialect: Dialect = "chat", **fields: object
) -> Span:
    attributes = {semconv.OPERATION: "chat", semconv.USER_AGENT: "OpenAI/Python 3"}
    if framework_id:
        attributes[semconv.FRAMEWORK_SPAN_ID] = framework_id
    call = ModelCall(
        dialect=dialect,
        request_id="",
        model="m",
        policy="main",
        status_code=200,
        prompt_ids=pack_ids([1, 2]),
        response_ids=pack_ids([3]),
        logprobs=pack_floats([0.5]),
    )
    return span(span_id, parent, attributes=attributes, call=call, **fields)


def ids(*spans: Span) -> tuple[list[str], list[str]]:
    found = find_disagreement(spans, attempt_id="r.1")
    return [call.span_id for call in found.unseen], [call.span_id for call in found.unattributed]


def test_a_chat_span_with_its_call_below_it_agrees():
    spans = [root(), framework("agent", "invoke_agent"), framework("chat", parent="agent"), recorded("c", "chat")]
    assert ([], []) == ids(*spans)


def test_recorded_embedding_outside_of_every_framework_span_is_not_reported() -> None:
    spans = [root(), framework("agent", "invoke_agent"), recorded("e", dialect="embeddings"), recorded("c")]
    assert ([], ["c"]) == ids(*spans)


@pytest.mark.parametrize("operation", [["chat"], {"chat": 1}, 3])
def test_an_operation_that_is_no_text_is_no_model_call(operation: object):
    odd = span("odd", attributes={semconv.OPERATION: operation})
    assert ([], ["c"]) == ids(root(), odd, recorded("c"))


def test_a_chat_span_without_a_call_is_unseen_and_names_its_client():
    about = {semconv.CLIENT: "grpc.ChatThing", semconv.SERVER_ADDRESS: "models.example", semconv.REQUEST_MODEL: "big"}
    agent = framework("agent", "invoke_agent", attributes={semconv.AGENT_NAME: "writer"})
    spans = [
        root(),
        agent,
        framework("seen", parent="agent"),
        recorded("c", "seen"),
        framework("lost", parent="agent", attributes=about),
    ]
    (lost,) = find_disagreement(spans, attempt_id="r.1").unseen
    assert ("lost", "writer", "big", "grpc.ChatThing to models.example") == (
        lost.span_id,
        lost.agent,
        lost.model,
        lost.client,
    )


def test_a_chat_span_around_another_ones_call_agrees_and_is_counted_once_without():
    assert ([], []) == ids(root(), framework("outer"), framework("inner", parent="outer"), recorded("c", "inner"))
    assert (["outer"], []) == ids(root(), framework("outer"), framework("inner", parent="outer"))


def test_a_chat_span_that_failed_or_is_late_or_of_another_attempt_is_not_unseen():
    other = Span(rollout_id="r", attempt_id="r.2", span_id="x", name="chat", attributes={semconv.OPERATION: "chat"})
    spans = [root(), framework("failed", status="error"), framework("late", is_late=True), other]
    assert ([], []) == ids(*spans)


def test_a_call_outside_of_what_the_framework_reported_is_unattributed():
    spans = [root(), framework("chat"), recorded("in", "chat"), recorded("out", "root")]
    assert ([], ["out"]) == ids(*spans)
    assert ([], []) == ids(root(), recorded("out", "root"))


def test_a_call_in_a_node_or_in_an_operation_is_attributed():
    spans = [root(), framework("node", "invoke_node"), recorded("a", "node"), span("draft"), recorded("b", "draft")]
    assert ([], []) == ids(*spans)


def test_a_foreign_programs_calls_that_name_no_span_count_for_chat_spans_that_were_open():
    chats = [framework("one", start=10_000_000, end=20_000_000), framework("two", start=90_000_000, end=99_000_000)]
    call = recorded("c", parent=None, start=11_000_000, end=15_000_000)
    assert (["two"], ["c"]) == ids(root(), *chats, call)
    named = recorded("c", "root", start=11_000_000, end=15_000_000)
    assert (["one", "two"], ["c"]) == ids(root(), *chats, named)


def test_a_call_that_a_watch_saw_is_unseen_and_makes_no_other_call_unattributed():
    watched = {semconv.UNRECORDED: "policy", semconv.CLIENT: "requests"}
    saw = framework("saw", attributes=watched, start=10_000_000, end=20_000_000)
    assert (["saw"], []) == ids(root(), saw, recorded("c", "root"))
    assert (["saw"], ["c"]) == ids(root(), framework("node", "invoke_node"), saw, recorded("c", "root"))


def test_a_call_that_a_watch_saw_is_not_taken_for_an_overlapping_one_that_names_no_span():
    saw = framework("saw", attributes={semconv.UNRECORDED: "policy"}, start=10_000_000, end=20_000_000)
    assert (["saw"], []) == ids(root(), saw, recorded("c", parent=None, start=11_000_000, end=15_000_000))


@pytest.mark.parametrize(("kind", "reject"), [("policy", "unseen_calls"), ("foreign", "")])
def test_a_call_to_a_server_of_no_policy_leaves_the_rollout_in_training(kind: str, reject: str):
    saw = framework("saw", attributes={semconv.UNRECORDED: kind}, start=10_000_000, end=20_000_000)
    episode = build_episode(ROLLOUT, ATTEMPT, [root(), saw, recorded("c", "root")])
    assert ([reject], [kind == "foreign"]) == (
        [call.reject for call in episode.transitions],
        [call.is_foreign for call in episode.unseen],
    )


@given(st.lists(st.sampled_from(["both", "tracer", "recording"]), max_size=12))
def test_every_call_is_on_exactly_the_side_that_saw_it(seen_by: list[str]):
    spans = [root(), framework("agent", "invoke_agent")]
    for i, who in enumerate(seen_by):
        if who != "recording":
            spans.append(framework(f"chat{i}", parent="agent"))
        if who != "tracer":
            spans.append(recorded(f"call{i}", f"chat{i}" if who == "both" else "root"))
    expected = (
        [f"chat{i}" for i, who in enumerate(seen_by) if who == "tracer"],
        [f"call{i}" for i, who in enumerate(seen_by) if who == "recording"],
    )
    assert expected == ids(*spans)


def test_no_call_of_a_partly_seen_attempt_trains_and_why_says_it():
    spans = [root(), framework("chat"), recorded("c", "chat"), framework("lost", attributes={semconv.CLIENT: "Grpc"})]
    episode = build_episode(ROLLOUT, ATTEMPT, spans)
    assert (("unseen_calls",), ()) == (tuple(call.reject for call in episode.transitions), episode.rows)
    assert [("lost", "Grpc")] == [(call.span_id, call.client) for call in episode.unseen]
    accepted = build_episode(ROLLOUT, ATTEMPT, spans, options=EpisodeOptions(unseen="accept"))
    assert ([""], 1, 1) == ([call.reject for call in accepted.transitions], len(accepted.rows), len(accepted.unseen))


def test_unattributed_calls_train_unless_the_experiment_says_otherwise():
    spans = [root(), framework("chat"), recorded("c", "chat"), recorded("out", "root")]
    episode = build_episode(ROLLOUT, ATTEMPT, spans)
    assert ["", ""] == [call.reject for call in episode.transitions]
    assert ["OpenAI/Python 3"] == [call.client[:15] for call in episode.unattributed]
    dropped = build_episode(ROLLOUT, ATTEMPT, spans, options=EpisodeOptions(unattributed="drop"))
    assert ["unattributed", "unattributed"] == [call.reject for call in dropped.transitions]
