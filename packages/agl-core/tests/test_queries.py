"""Stores take ids, pages and queries of certain forms, and a query selects rollouts and spans by each of its fields."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agl import semconv
from agl.contracts import ExperimentRecord, LabelMove, Metric, Presence, Recording, RolloutQuery, SpanQuery, Store
from agl.episodes import Enclosing
from agl.errors import ConflictError, InvalidIdError, InvalidQueryError, InvalidRecordError, StoreError
from agl.schemas import Attempt, ErrorInfo, JsonResource, ResourceVersion, Reward, Rollout, Span, SpanEvent
from agl.stores import MemoryStore
from agl.stores import _queries as queries
from agl.stores import _values as values
from tests.cases import ATTEMPT, agent_span, call_span, plain_span, reward_span


def queued(rollout_id: str = "a", **fields: object) -> Rollout:
    return Rollout(rollout_id=rollout_id, task={"q": 1}, **fields)  # pyright: ignore[reportArgumentType]  # shorthand


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (queued("a/b"), "rollout_id 'a/b' of a Rollout"),
        (queued(""), "rollout_id '' of a Rollout"),
        (queued("a" * 257), f"rollout_id '{'a' * 80}' of a Rollout"),
        (queued(experiment="a\n"), "experiment 'a\\n' of a Rollout"),
        (ResourceVersion(name="", version="1", resource=JsonResource(value=1)), "name '' of a ResourceVersion"),
        (ResourceVersion(name="n", version="/", resource=JsonResource(value=1)), "version '/' of a ResourceVersion"),
        (LabelMove(name="n", label="", version="1"), "label '' of a LabelMove"),
        (ExperimentRecord(name="\ud800"), "name '\\ud800' of a ExperimentRecord"),
        (Presence(experiment="e", member="a/b", session="s"), "member 'a/b' of a Presence"),
        (Metric(experiment="a/b", algorithm="a", step=1, name="loss", value=1.0), "experiment 'a/b' of a Metric"),
    ],
)
def test_id_that_no_store_takes_is_named(record: object, shown: str) -> None:
    for records in ([record], [queued(), [queued("b"), (record,)]]):
        with pytest.raises(InvalidIdError) as caught:
            values.check_ids(records)
        assert str(caught.value).startswith(shown)
        assert " characters; an id or a name has 1 to 256, without slashes" in str(caught.value)


def test_ids_of_up_to_256_characters_and_empty_names_of_owners_are_taken() -> None:
    values.check_ids(["", "/", 1, None, [queued("a" * 256), queued("ä b.1"), queued(experiment="")]])
    values.check_ids([Presence(experiment="e", member="", session=""), Presence(experiment="", session="s")])


@pytest.mark.parametrize(("text", "expected"), [("a", True), ("grpo.1", True), ("", False), ("a/b", False)])
def test_text_may_be_a_name(text: str, expected: bool) -> None:
    assert expected is values.is_name(text)


MOST = 2**63 - 1


@pytest.mark.parametrize("limit", [0, 1, MOST])
def test_pages_that_a_store_can_count_to_are_taken(limit: int) -> None:
    queries.check_page({"limit": limit, "after": limit}, RolloutQuery(limit=limit), SpanQuery(limit=limit, after=limit))
    queries.check_page({"after": None, "query": RolloutQuery(limit=limit, after="a")}, "a")


@pytest.mark.parametrize("number", [-1, MOST + 1])
def test_page_that_no_store_can_count_to_is_refused(number: int) -> None:
    limited: list[RolloutQuery | SpanQuery] = [RolloutQuery(limit=number), SpanQuery(limit=number)]
    for query in limited:
        for arguments in ({"query": query}, {"limit": 1, "spans": query}):
            with pytest.raises(StoreError, match=rf"^limit = {number}; choose between 0 and {MOST}$"):
                queries.check_page(arguments)
        with pytest.raises(StoreError, match=rf"^limit = {number};"):
            queries.check_page({}, "a", query)
    with pytest.raises(StoreError, match=rf"^after = {number};"):
        queries.check_page({}, SpanQuery(after=number))
    for name in ("limit", "after"):
        with pytest.raises(StoreError, match=rf"^{name} = {number};"):
            queries.check_page({name: number})


ALL = [
    queued("a", experiment="x", mode="train", group_id="g"),
    queued("b", experiment="x", mode="val", status="running"),
    queued("c", experiment="y", mode="train", status="failed"),
    queued("d", experiment="x", mode="train", group_id="g", status="succeeded"),
]


@pytest.mark.parametrize(
    ("sort", "value", "fits"),
    [
        ("rollout_id", "", True),
        ("created_at", 0.0, True),
        ("finished_at", "", False),
        ("created_at", "queued", False),
        ("status", "queued", True),
        ("status", 1.5, False),
    ],
)
def test_page_behind_a_value_of_another_type_is_refused(sort: Any, value: str | float, fits: bool) -> None:
    query = RolloutQuery(sort=sort, after="a", after_value=value)
    if fits:
        queries.check_page({}, query)
        return
    with pytest.raises(InvalidQueryError, match=rf"after_value = .* is no {sort} of a rollout; .*RolloutQuery.next"):
        queries.check_page({"query": query})


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (RolloutQuery(), "abcd"),
        (RolloutQuery(is_newest_first=True), "dcba"),
        (RolloutQuery(limit=2), "ab"),
        (RolloutQuery(limit=2, is_newest_first=True), "dc"),
        (RolloutQuery(after="b"), "cd"),
        (RolloutQuery(after="b", is_newest_first=True), "a"),
        (RolloutQuery(after="bb"), "cd"),
        (RolloutQuery(after="bb", is_newest_first=True), "ba"),
        (RolloutQuery(experiment="x"), "abd"),
        (RolloutQuery(experiment=""), ""),
        (RolloutQuery(mode="val"), "b"),
        (RolloutQuery(group_id="g"), "ad"),
        (RolloutQuery(status=("running", "failed")), "bc"),
        (RolloutQuery(experiment="x", mode="train", after="a"), "d"),
    ],
)
def test_query_selects_in_its_order(query: RolloutQuery, expected: str) -> None:
    assert list(expected) == [rollout.rollout_id for rollout in queries.select(ALL[::-1], query)]


TIMED = [
    queued("a", finished_at=2.0),
    queued("b", finished_at=1.0),
    queued("c", finished_at=2.0),
    queued("d"),
]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (RolloutQuery(sort="finished_at"), "dbac"),
        (RolloutQuery(sort="finished_at", is_newest_first=True), "cabd"),
        (RolloutQuery(sort="finished_at", after="b", after_value=1.0), "ac"),
        (RolloutQuery(sort="finished_at", after="a", after_value=2.0), "c"),
        (RolloutQuery(sort="finished_at", after="c", after_value=2.0, is_newest_first=True), "abd"),
        (RolloutQuery(after="b", after_value=9.0), "cd"),
    ],
)
def test_page_behind_a_rollout_goes_on_by_the_field_that_sorts(query: RolloutQuery, expected: str) -> None:
    assert list(expected) == [rollout.rollout_id for rollout in queries.select(TIMED, query)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ["red-1", "x", "y"]), ("red", ["red-1", "x"]), ('"q":"red', ["x"]), ("-1", ["red-1"]), ("null", [])],
)
def test_text_is_looked_for_in_ids_and_tasks(text: str, expected: list[str]) -> None:
    tasks = {"red-1": "blue", "x": {"q": "redder"}, "y": ["green"]}
    rollouts = [Rollout(rollout_id=name, task=task) for name, task in tasks.items()]
    assert expected == [rollout.rollout_id for rollout in queries.select(rollouts, RolloutQuery(contains=text))]


TEAM = [
    plain_span("plan"),
    agent_span("writer", parent="plan"),
    plain_span("web", parent="writer", name="search web", attributes={semconv.OPERATION: semconv.OP_EXECUTE_TOOL}),
    call_span(1, parent="writer", attributes={semconv.OPERATION: semconv.OP_CHAT}),
    plain_span("over", parent="writer", name="handoff critic", attributes={semconv.OPERATION: semconv.OP_HANDOFF}),
    agent_span("critic", parent="plan"),
    call_span(2, parent="critic"),
    reward_span(2, 1.0, parent="critic"),
    call_span(3, parent="plan"),
]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (SpanQuery(), [span.span_id for span in TEAM]),
        (SpanQuery(name="search web"), ["web"]),
        (SpanQuery(name="search"), []),
        (SpanQuery(contains="r"), ["writer", "web", "over", "critic"]),
        (SpanQuery(name="writer", contains="chat"), []),
        (SpanQuery(kind="call"), ["c1", "c2", "c3"]),
        (SpanQuery(kind="chat"), []),
        (SpanQuery(kind="reward"), ["w2"]),
        (SpanQuery(kind="tool"), ["web"]),
        (SpanQuery(kind="handoff"), ["over"]),
        (SpanQuery(kind="agent"), ["writer", "critic"]),
        (SpanQuery(kind="None"), []),
        (SpanQuery(agent="critic"), ["critic", "c2", "w2"]),
        (SpanQuery(agent="plan"), ["plan", "c3"]),
        (SpanQuery(agent="critic", kind="call"), ["c2"]),
        (SpanQuery(agent="critic", kind="tool"), []),
        (SpanQuery(agent="writer", name="chat m"), ["c1"]),
        (SpanQuery(name="search web", kind="call"), []),
        (SpanQuery(agent="nobody"), []),
    ],
)
def test_spans_are_chosen_by_name_kind_and_agent(query: SpanQuery, expected: list[str]) -> None:
    around = Enclosing([queries.bare(span) for span in TEAM])
    assert expected == [span.span_id for span in TEAM if queries.is_chosen(span, query, around)]


def test_kind_is_the_last_word_of_the_operation() -> None:
    span = plain_span("s", attributes={semconv.OPERATION: "invoke_inner_agent"})
    assert queries.is_chosen(span, SpanQuery(kind="agent"), Enclosing([]))


def test_bare_span_has_the_names_of_actors_alone() -> None:
    names = {semconv.AGENT_NAME: "a", semconv.OPERATION: "chat", semconv.FRAMEWORK_SPAN_ID: "f"}
    full = replace(
        call_span(1, attributes={**names, "long": "x" * 1000}),
        events=(SpanEvent(name="e", time_ns=1),),
        reward=Reward(value=1.0),
    )
    assert replace(full, attributes=names, events=(), call=None, reward=None) == queries.bare(full)


ACTORS = [
    {},
    {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: "solver"},
    {semconv.NODE: "draft"},
    {semconv.ROLE: "judge"},
    {semconv.FRAMEWORK_SPAN_ID: "s0"},
    {"other": 1},
]


def span_in_tree(number: int, parent: int, what: str, attributes: dict[str, object]) -> Span:
    """Return the span ``s<number>`` of a tree of operations, calls and rewards."""
    made = plain_span(f"s{number}", parent=f"s{parent}" if parent < number else None, attributes=attributes)
    if what == "call":
        return replace(made, call=call_span(number).call)
    return replace(made, reward=Reward(value=1.0)) if what == "reward" else made


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.sampled_from(["plain", "call", "reward"]), st.sampled_from(ACTORS)), max_size=7
    )
)
def test_bare_spans_name_the_same_actors_around_others(tree: list[tuple[int, str, dict[str, object]]]) -> None:
    spans = [span_in_tree(number, *each) for number, each in enumerate(tree)]
    whole, bare = Enclosing(spans), Enclosing([queries.bare(span) for span in spans])
    assert [whole.who(span) for span in spans] == [bare.who(span) for span in spans]


async def test_spans_inside_a_judged_step_are_chosen_by_the_operation_around_it() -> None:
    """An evaluation that arrived over OTLP may enclose calls; its name is not the name of an operation."""

    store = MemoryStore()
    await store.enqueue([queued("r")])
    await store.claim(worker="w")
    judged = replace(reward_span(1, 1.0, parent="plan"), span_id="judge", name="judge")
    await store.append_spans([plain_span("plan"), judged, call_span(2, parent="judge")])
    for agent, expected in (("plan", ["plan", "judge", "c2"]), ("judge", [])):
        (found,) = await store.recordings(RolloutQuery(ids=("r",)), spans=SpanQuery(agent=agent))
        assert sorted(expected) == sorted(span.span_id for span in found.spans)


RECORDED = Rollout(rollout_id="r", task=1, status="succeeded", attempts=1)
OTHER = Attempt(attempt_id="s.1", rollout_id="s", number=1, worker="w")


def test_recording_of_another_store_is_accepted_only_with_its_own_attempts_and_spans() -> None:
    spans = [call_span(1), replace(call_span(2), attempt_id="")]
    values.check_recording(Recording(rollout=RECORDED, attempts=[ATTEMPT], spans=spans))
    values.check_recording(Recording(rollout=Rollout(rollout_id="r", task=1), attempts=[]))
    odd: list[tuple[Any, type[StoreError], str]] = [
        ({"rollout": replace(RECORDED, rollout_id="r/1")}, InvalidIdError, "rollout_id"),
        ({"attempts": [OTHER]}, ConflictError, "'r' has the attempt 's.1' of rollout 's'"),
        ({"attempts": [replace(ATTEMPT, number=2)]}, ConflictError, "has the attempt 'r.1'"),
        ({"rollout": replace(RECORDED, attempts=0)}, ConflictError, "counts 0 attempts and has number 1"),
        ({"rollout": replace(RECORDED, attempts=20_000)}, ConflictError, "counts 20000 attempts and has number 1"),
        ({"spans": [replace(call_span(1), rollout_id="s")]}, ConflictError, "has the span 'c1' of attempt 'r.1' of"),
        ({"spans": [call_span(1, attempt_id="r.2")]}, ConflictError, "has the span 'c1' of attempt 'r.2' of"),
    ]
    for change, error, text in odd:
        with pytest.raises(error, match=text):
            values.check_recording(replace(Recording(rollout=RECORDED, attempts=[ATTEMPT], spans=spans), **change))


@pytest.mark.parametrize("texts", [{}, {"request": {"a": 1}}, {"response": {"a": 1}}, {"request": 1, "response": 2}])
def test_span_with_a_value_of_another_type_is_refused_whatever_its_call_holds(texts: dict[str, Any]) -> None:
    plain = call_span(1)
    assert plain.call is not None
    good = replace(plain, call=replace(plain.call, **texts))
    assert good == values.copied(good)
    with pytest.raises(
        InvalidRecordError, match=r"span 'c1' \('chat m'\) of attempt 'r\.1' cannot be stored: .*object"
    ):
        values.copied(replace(good, attributes={"a": {1: object()}}))


def test_damaged_record_is_named_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    values.note_damage.cache_clear()
    good = values.encoded(RECORDED)
    assert [RECORDED, RECORDED] == values.readable([good, None, b"{", good], Rollout)
    (message,) = caplog.messages
    assert message.startswith(
        "a stored Rollout cannot be read (damaged, or of another version of agl): Expected `object`"
    )


def test_recording_with_a_damaged_attempt_or_span_is_not_readable() -> None:
    whole = Recording(rollout=RECORDED, attempts=[ATTEMPT], spans=[call_span(1)])
    failed = ErrorInfo(type="ValueError", message="of the agent")
    assert queries.is_readable(whole)
    assert queries.is_readable(replace(whole, attempts=[replace(ATTEMPT, error=failed)]))
    damaged = replace(failed, type=semconv.UNREADABLE)
    assert not queries.is_readable(replace(whole, attempts=[replace(ATTEMPT, error=damaged)]))
    assert not queries.is_readable(replace(whole, spans=[call_span(1), plain_span("8", name=semconv.UNREADABLE)]))


class Pages:
    """A store of rollouts `r0`, `r1`, ... with spans, two rollouts and three spans to a page."""

    def __init__(self, count: int, spans: int, *, is_whole: bool) -> None:
        self.rollouts = [replace(RECORDED, rollout_id=f"r{i}") for i in range(count)]
        self.all = [replace(call_span(n), rollout_id="r0") for n in range(1, spans + 1)]
        self.is_whole = is_whole
        self.asked: list[tuple[Any, ...]] = []

    async def recordings(self, query: RolloutQuery, *, spans: Any) -> list[Recording]:
        self.asked.append((query.after, spans))
        left = [r for r in self.rollouts if r.rollout_id > query.after and r.rollout_id in (query.ids or r.rollout_id)]
        return [Recording(rollout=r, attempts=[ATTEMPT], spans=self.all[:1], is_whole=self.is_whole) for r in left[:2]]

    async def spans(self, rollout_id: str, *, attempt_id: str | None, after: int, limit: int) -> list[Span]:
        self.asked.append((rollout_id, attempt_id, after))
        return self.all[after : after + limit]


def read(store: Pages, query: RolloutQuery, **options: Any) -> list[Recording]:
    async def work() -> list[Recording]:
        return [recording async for recording in queries.read_recordings(cast("Store", store), query, **options)]

    return asyncio.run(work())


def test_all_pages_of_recordings_are_read_and_none_after_the_last_id() -> None:
    store = Pages(5, 1, is_whole=True)
    assert [f"r{i}" for i in range(5)] == [each.rollout.rollout_id for each in read(store, RolloutQuery())]
    assert [("", "deciding"), ("r1", "deciding"), ("r3", "deciding"), ("r4", "deciding")] == store.asked
    store.asked.clear()
    found = read(store, RolloutQuery(ids=("r0", "r1", "r2", "r3")), spans="none")
    assert (4, [("", "none"), ("r1", "none")]) == (len(found), store.asked)


def test_rest_of_a_recordings_spans_is_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE", 3)
    store = Pages(1, 6, is_whole=False)
    (recording,) = read(store, RolloutQuery())
    assert (store.all, [ATTEMPT], True) == (recording.spans, recording.attempts, recording.is_whole)
    assert [("r0", None, 0), ("r0", None, 3), ("r0", None, 6)] == store.asked[1:4]
    (every,) = read(store, RolloutQuery(), spans="all")
    assert (2 * store.all, ["", ATTEMPT.attempt_id]) == (
        every.spans,
        list(dict.fromkeys(asked[1] for asked in store.asked[6:-1])),
    )
    (page,) = read(store, RolloutQuery(), spans=SpanQuery())
    assert store.all[:1] == page.spans
