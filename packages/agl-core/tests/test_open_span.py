"""Open spans: their attributes and children, and that each ends exactly once, wherever it is closed."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agl import emit_message, operation, semconv
from agl.schemas import Span
from agl.tracing import (
    ActiveAttempt,
    OpenSpan,
    SpanRecorder,
    activate,
    current_span,
    current_span_id,
    note_model_call,
    open_span,
    patch_subclasses,
    stepped,
    who,
)

ROOT = "1" * 16


def attempt_to(recorder: SpanRecorder, number: int = 1) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id=f"ro-{number}",
        attempt_id=f"ro-{number}.1",
        trace_id="a" * 32,
        root_span_id=ROOT,
        record=recorder.record,
    )


@pytest.fixture
def recorder() -> SpanRecorder:
    return SpanRecorder()


@pytest.fixture
def attempt(recorder: SpanRecorder) -> Iterator[ActiveAttempt]:
    attempt = attempt_to(recorder)
    with activate(attempt):
        yield attempt


def only(recorder: SpanRecorder) -> Span:
    (span,) = recorder.drain()
    return span


@pytest.mark.parametrize(
    ("about", "name", "attributes"),
    [
        (
            {"agent": "writer", "agent_id": "a1"},
            "invoke_agent writer",
            {semconv.OPERATION: "invoke_agent", semconv.AGENT_NAME: "writer", semconv.AGENT_ID: "a1"},
        ),
        ({"node": "plan"}, "invoke_node plan", {semconv.OPERATION: semconv.OP_INVOKE_NODE, semconv.NODE: "plan"}),
        ({"role": "judge"}, "span", {semconv.ROLE: "judge"}),
        (
            {"workflow": "crew", "conversation": "c7"},
            "invoke_workflow crew",
            {
                semconv.OPERATION: "invoke_workflow",
                semconv.WORKFLOW_NAME: "crew",
                semconv.CONVERSATION_ID: "c7",
            },
        ),
        (
            {"tool": "search", "call_id": "t1", "arguments": {"q": ("tides",)}, "result": 7},
            "execute_tool search",
            {
                semconv.OPERATION: "execute_tool",
                semconv.TOOL_NAME: "search",
                semconv.TOOL_CALL_ID: "t1",
                semconv.TOOL_ARGUMENTS: {"q": ["tides"]},
                semconv.TOOL_RESULT: 7,
            },
        ),
        (
            {"source": "triage", "target": "sales"},
            "handoff sales",
            {semconv.OPERATION: "handoff", semconv.HANDOFF_SOURCE: "triage", semconv.HANDOFF_TARGET: "sales"},
        ),
        (
            {"model": "m", "provider": "p", "client": "pkg.Client", "server": "https://gpu:8000/v1"},
            "chat m",
            {
                semconv.OPERATION: "chat",
                semconv.REQUEST_MODEL: "m",
                semconv.PROVIDER: "p",
                semconv.CLIENT: "pkg.Client",
                semconv.SERVER_ADDRESS: "gpu",
            },
        ),
        ({"operation": "rerank", "node": "sort"}, "rerank sort", {semconv.OPERATION: "rerank", semconv.NODE: "sort"}),
        (
            {"agent": None, "tool": "", "node": "x"},
            "invoke_node x",
            {semconv.OPERATION: "invoke_node", semconv.NODE: "x"},
        ),
    ],
)
@pytest.mark.usefixtures("attempt")
def test_words_become_the_attributes_and_the_name_of_the_conventions(
    recorder: SpanRecorder, about: dict[str, Any], name: str, attributes: dict[str, Any]
):
    open_span(**about).close()
    span = only(recorder)
    assert (name, "ok", ROOT) == (span.name, span.status, span.parent_id)
    assert attributes == span.attributes


@pytest.mark.usefixtures("attempt")
def test_a_given_name_and_attributes_are_kept_beside_the_words(recorder: SpanRecorder):
    with open_span("mine", agent="writer", attributes={"step": 1}, kind="client") as span:
        span.set({"found": (2, 3)}, agent=None, role="judge")
    span = only(recorder)
    assert ("mine", "client") == (span.name, span.kind)
    assert {semconv.ROLE: "judge", "step": 1, "found": [2, 3]} == span.attributes


def test_what_happens_within_a_span_belongs_to_it(attempt: ActiveAttempt, recorder: SpanRecorder):
    with open_span(agent="writer") as outer:
        assert current_span_id() == outer.span_id
        assert current_span() is outer
        assert "writer" == who().agent
        with open_span(node="draft"), operation("polish"):
            assert ("writer", "draft", "polish") == who().path
            emit_message("deep")
    assert current_span_id() == attempt.root_span_id
    message, polish, draft, writer = recorder.drain()
    assert [polish.span_id, draft.span_id, writer.span_id, ROOT] == [
        span.parent_id for span in (message, polish, draft, writer)
    ]


def test_a_span_that_is_not_current_encloses_only_what_enters_it(attempt: ActiveAttempt, recorder: SpanRecorder):
    span = open_span(agent="writer", is_current=False)
    assert current_span_id() == attempt.root_span_id
    for _ in range(2):
        with span.entered():
            assert "writer" == who().agent
        assert current_span_id() == attempt.root_span_id
    assert span.is_open
    span.close()
    assert ROOT == only(recorder).parent_id


@pytest.mark.usefixtures("attempt")
def test_parent_ids_and_times_that_a_framework_knows_are_kept(recorder: SpanRecorder):
    outer = open_span(node="outer", span_id="b" * 16, start_ns=100, is_current=False)
    open_span(node="inner", parent=outer.span_id, trace_id="c" * 32, start_ns=200).close(end_ns=300)
    outer.close(end_ns=50)
    inner, outer_span = recorder.drain()
    assert ("b" * 16, "c" * 32, 200, 300) == (inner.parent_id, inner.trace_id, inner.start_ns, inner.end_ns)
    assert ("b" * 16, 100, 100) == (outer_span.span_id, outer_span.start_ns, outer_span.end_ns)


@pytest.mark.usefixtures("attempt")
def test_an_error_is_recorded_with_its_type_and_passes_through(recorder: SpanRecorder):
    error = KeyError("agent")
    with pytest.raises(KeyError) as caught, open_span(tool="search"):
        raise error
    assert caught.value is error
    span = only(recorder)
    assert ("error", "'agent'", "KeyError") == (span.status, span.status_message, span.attributes[semconv.ERROR_TYPE])
    assert "test_open_span.py" in span.events[0].attributes["exception.stacktrace"]
    open_span(tool="search").close("no such page", error_type="ToolError")
    span = only(recorder)
    assert ("error", "no such page", "ToolError") == (
        span.status,
        span.status_message,
        span.attributes[semconv.ERROR_TYPE],
    )


@pytest.mark.usefixtures("attempt")
def test_only_the_first_close_counts(recorder: SpanRecorder):
    with open_span(tool="search") as span:
        span.close(result=1)
        assert not span.is_open
    span.close(RuntimeError("late"), result=2)
    found = only(recorder)
    assert ("ok", 1) == (found.status, found.attributes[semconv.TOOL_RESULT])


def test_a_span_may_be_closed_by_many_threads_at_once_and_is_recorded_once(
    attempt: ActiveAttempt, recorder: SpanRecorder
):
    spans = [open_span(node=str(number), is_current=False) for number in range(200)]
    start = threading.Barrier(4)

    def close_all() -> None:
        start.wait(10)
        for span in spans:
            span.close()

    threads = [threading.Thread(target=close_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(span.span_id for span in spans) == sorted(span.span_id for span in recorder.drain())
    assert 0 == len(attempt.spans)


@pytest.mark.usefixtures("attempt")
def test_a_span_that_another_thread_closed_encloses_nothing_more(recorder: SpanRecorder):
    outer = open_span(agent="outer")
    inner = open_span(agent="inner")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(inner.close).result(10)
        assert outer.span_id == current_span_id()
        assert "outer" == who().agent
        pool.submit(outer.close).result(10)
    emit_message("after")
    assert [outer.span_id, ROOT, ROOT] == [span.parent_id for span in recorder.drain()]


def test_a_span_that_nobody_closed_is_recorded_when_its_attempt_ends(recorder: SpanRecorder):
    with activate(attempt_to(recorder)) as attempt:
        open_span(agent="writer")
        left = open_span(tool="search", arguments="tides")
    assert 0 == len(attempt.spans)
    tool, agent = recorder.drain()
    assert ["execute_tool search", "invoke_agent writer"] == [tool.name, agent.name]
    assert {("error", "still open when the attempt ended")} == {(s.status, s.status_message) for s in (tool, agent)}
    assert agent.span_id == tool.parent_id
    thread = threading.Thread(target=lambda: left.close(result="late"))
    thread.start()
    thread.join(10)
    assert not left.is_open
    assert [] == recorder.drain()


def test_a_span_of_an_attempt_that_ended_names_nobody_in_the_next(recorder: SpanRecorder):
    with activate(attempt_to(SpanRecorder(), 1)):
        old = open_span(agent="old")
        with activate(attempt_to(recorder, 2)) as attempt:
            assert "" == who().agent
            assert attempt.root_span_id == current_span_id()
            with old.entered():
                assert attempt.root_span_id == current_span_id()
                emit_message("new")
        assert "old" == who().agent
    with old.entered():
        assert current_span_id() is None
    assert ROOT == only(recorder).parent_id


def test_a_span_ends_with_the_task_that_is_cancelled_in_it(recorder: SpanRecorder):
    async def work(entered: asyncio.Event) -> None:
        with open_span(agent="writer"):
            entered.set()
            await asyncio.Event().wait()

    async def run() -> None:
        with activate(attempt_to(recorder)):
            entered = asyncio.Event()
            task = asyncio.create_task(work(entered))
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    span = only(recorder)
    assert ("error", "CancelledError") == (span.status, span.attributes[semconv.ERROR_TYPE])


def test_spans_of_tasks_that_run_at_once_keep_apart(recorder: SpanRecorder):
    async def work(name: str, others: asyncio.Barrier) -> str:
        with open_span(agent=name):
            await others.wait()
            return await asyncio.to_thread(lambda: who().agent)

    async def run() -> list[str]:
        with activate(attempt_to(recorder)):
            others = asyncio.Barrier(8)
            return await asyncio.gather(*(work(f"a{number}", others) for number in range(8)))

    assert [f"a{number}" for number in range(8)] == asyncio.run(run())
    assert {ROOT} == {span.parent_id for span in recorder.drain()}


@pytest.mark.usefixtures("attempt")
def test_a_generator_that_its_reader_left_has_not_failed(recorder: SpanRecorder):
    def numbers() -> Iterator[int]:
        with open_span(tool="count"):
            yield 1
            yield 2

    stream = numbers()
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert "ok" == only(recorder).status


def test_ten_thousand_open_spans_are_all_recorded_in_reasonable_time(recorder: SpanRecorder):
    started = time.process_time()
    with activate(attempt_to(recorder)):
        for number in range(10_000):
            open_span(node=f"n{number}")
        assert 64 == len(who().path)
    assert 10_000 == len(recorder.drain())
    assert time.process_time() - started < 20


def test_outside_a_rollout_a_span_does_nothing():
    with open_span(agent="writer", attributes=lambda: 1 / 0) as span:  # type: ignore[arg-type,return-value]
        span.set({"step": object()}, tool="search")  # type: ignore[dict-item]
        with span.entered():
            assert current_span() is span
    span.close(RuntimeError("x"))
    assert ("", False, 0) == (span.span_id, span.is_open, span.model_calls)
    assert {} == span.actor_attributes()[0]


class Hostile:
    """A value that raises when it is converted to text."""

    def __str__(self) -> str:
        raise ZeroDivisionError("hostile")


class Vague:
    """A value, such as an array, that can be neither compared nor converted to a bool."""

    def __str__(self) -> str:
        return "[1 2]"

    def __ne__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


class HostileError(Exception):
    """An exception whose message raises when it is read."""

    def __str__(self) -> str:
        raise ZeroDivisionError("hostile")


@pytest.mark.usefixtures("attempt")
@pytest.mark.parametrize("about", [{"server": "http://[half"}, {"server": Hostile()}, {"agnet": "misspelled"}])
def test_what_cannot_be_described_is_logged_and_the_span_recorded_without_it(
    recorder: SpanRecorder, caplog: pytest.LogCaptureFixture, about: dict[str, Any]
):
    with open_span("step", **about):
        pass
    assert "step" == only(recorder).name
    assert "could not be described" in caplog.text


@pytest.mark.usefixtures("attempt")
def test_attributes_that_cannot_be_read_cost_only_themselves(recorder: SpanRecorder, caplog: pytest.LogCaptureFixture):
    with open_span("step", agent="writer", attributes=lambda: 1 / 0):  # type: ignore[arg-type,return-value]
        pass
    assert {semconv.OPERATION: "invoke_agent", semconv.AGENT_NAME: "writer"} == only(recorder).attributes
    assert "could not be read" in caplog.text


@pytest.mark.usefixtures("attempt")
def test_a_value_without_a_text_is_recorded_by_its_type(recorder: SpanRecorder):
    with open_span(tool="t", arguments={"x": Hostile()}, attributes={"y": [Hostile()]}):  # type: ignore[list-item]
        pass
    found, text = only(recorder).attributes, "<Hostile: its __str__ raised>"
    assert ({"x": text}, [text]) == (found[semconv.TOOL_ARGUMENTS], found["y"])


@pytest.mark.usefixtures("attempt")
def test_a_value_that_cannot_be_compared_is_recorded(recorder: SpanRecorder):
    with open_span(tool="t", result=Vague()):
        pass
    assert "[1 2]" == only(recorder).attributes[semconv.TOOL_RESULT]


@pytest.mark.usefixtures("attempt")
def test_an_exception_without_a_message_is_recorded_by_its_type(recorder: SpanRecorder):
    error = HostileError()
    with pytest.raises(HostileError) as caught, open_span("step"):
        raise error
    assert caught.value is error
    span = only(recorder)
    assert ("error", "HostileError") == (span.status, span.attributes[semconv.ERROR_TYPE])
    assert "<HostileError: its __str__ raised>" == span.status_message


def test_a_recorder_that_fails_is_logged_and_never_reaches_the_agent(caplog: pytest.LogCaptureFixture):
    def broken(span: Span) -> None:
        raise OSError(f"no room for {span.name}")

    attempt = ActiveAttempt(rollout_id="ro-1", attempt_id="ro-1.1", trace_id="a" * 32, root_span_id=ROOT, record=broken)
    with activate(attempt):
        with open_span(tool="search"):
            pass
        open_span(agent="left")
    assert ["no room for execute_tool search", "no room for invoke_agent left"] == [
        str(record.exc_info[1]) for record in caplog.records if record.exc_info
    ]


def test_spans_hold_no_credentials(attempt: ActiveAttempt, recorder: SpanRecorder):
    key = "sk-proj-abcdefghijklmnop"
    with open_span(tool="t", arguments={"key": [key]}, attributes={"header": f"Bearer {key}"}) as span:
        span.set({"more": key})
        span.close(f"refused {key}")
    assert key not in repr(recorder.drain())
    assert 0 == len(attempt.spans)


def calls_of(count: int) -> None:
    """Make model calls through a client whose transport answers within the process."""
    httpx = pytest.importorskip("httpx")
    answer = httpx.Response(200, json={"id": "c", "choices": [{"index": 0, "message": {"content": "hi"}}]})
    with httpx.Client(transport=httpx.MockTransport(lambda _: answer)) as client:
        for _ in range(count):
            client.post("http://x/v1/chat/completions", json={"model": "m", "messages": []})


@pytest.mark.usefixtures("attempt")
def test_a_span_counts_the_model_calls_that_leave_while_it_is_entered():
    with open_span(agent="outer") as outer:
        calls_of(1)
        with open_span(node="inner") as inner:
            calls_of(2)
        aside = open_span(node="aside", is_current=False)
        calls_of(1)
    assert (4, 2, 0) == (outer.model_calls, inner.model_calls, aside.model_calls)


@pytest.mark.usefixtures("attempt")
def test_a_stand_in_is_recorded_only_where_no_model_call_left(recorder: SpanRecorder):
    with open_span(client="pkg.Client", unless_called=True):
        calls_of(1)
    assert [True] == [span.call is not None for span in recorder.drain()]
    with open_span(client="pkg.Outer", unless_called=True) as outer, open_span(client="pkg.Local", unless_called=True):
        assert ROOT == current_span_id()
    assert 1 == outer.model_calls
    span = only(recorder)
    assert ("chat", "pkg.Local") == (span.name, span.attributes[semconv.CLIENT])


@pytest.mark.usefixtures("attempt")
def test_a_stand_in_is_not_recorded_where_a_framework_reports_the_call(recorder: SpanRecorder):
    with open_span(client="pkg.Client", unless_called=True):
        note_model_call()
        open_span(model="dove", is_current=False).close()
    assert ["chat dove"] == [span.name for span in recorder.drain()]


@pytest.mark.usefixtures("attempt")
def test_items_are_made_within_a_span_that_their_reader_does_not_enter(recorder: SpanRecorder):
    def read(items: Any) -> list[tuple[str, str]]:
        async def each() -> list[tuple[str, str]]:
            return [(item, current_span().name) async for item in stepped(opening, items)]

        return asyncio.run(each())

    def opening() -> OpenSpan:
        return open_span("making", is_current=False)

    async def generated() -> AsyncIterator[str]:
        for _ in range(2):
            yield current_span().name

    class Iterated:
        """An iterator that cannot be closed."""

        def __aiter__(self) -> "Iterated":
            return self

        def __init__(self) -> None:
            self._left = 2

        async def __anext__(self) -> str:
            self._left -= 1
            if self._left < 0:
                raise StopAsyncIteration
            return current_span().name

    assert [[("making", "")] * 2] * 2 == [read(generated()), read(Iterated())]
    assert ["making"] * 2 == [span.name for span in recorder.drain()]


@pytest.mark.parametrize("has_hook", [False, True])
def test_subclasses_are_patched_when_they_are_defined_until_that_is_undone(has_hook: bool):
    seen: list[str] = []

    class Plain:
        pass

    class Hooked:
        def __init_subclass__(cls) -> None:
            seen.append(cls.__name__)

    base: Any = Hooked if has_hook else Plain
    hook = vars(base).get("__init_subclass__")

    class Early(base):
        def name(self) -> str:
            return "early"

    undo = patch_subclasses(base, {"name": lambda original: lambda self: original(self).upper()})

    class Late(Early):
        def name(self) -> str:
            return "late"

    class Inherits(Late):
        pass

    assert ["EARLY", "LATE", "LATE"] == [kind().name() for kind in (Early, Late, Inherits)]
    undo()
    assert ["early", "late", "late"] == [kind().name() for kind in (Early, Late, Inherits)]
    assert hook is vars(base).get("__init_subclass__")
    assert (["Early", "Late", "Inherits"] if has_hook else []) == seen


def test_opening_outside_a_rollout_costs_little_more_than_a_call():
    def cost(work: Any) -> float:
        def once() -> float:
            started = time.process_time()
            for _ in range(20_000):
                work()
            return time.process_time() - started

        return min(once() for _ in range(5))

    def open_one() -> None:
        open_span(tool="search", arguments="tides")

    def plain_call() -> None:
        dict(tool="search", arguments="tides", parent=None, span_id="", kind="internal", attributes=None)

    if sys.gettrace() is None:
        assert cost(open_one) < 20 * cost(plain_call)
