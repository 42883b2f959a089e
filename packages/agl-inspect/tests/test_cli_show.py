"""``agl show`` and tables: contents cut or whole, harmless for a terminal, and on lines that fit its width."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from agl import Reward, Rollout, Span, semconv
from agl.contracts import Recording, RolloutQuery, SpanQuery, Store
from agl.schemas import Claim, ErrorInfo, ModelCall, Outcome
from agl.stores import MemoryStore
from agl_inspect.rollouts.span_reader import SpanReader
from agl_inspect.terminal.output import print_table
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

ASKED = {"role": "user", "content": "What is 2+3? Use the tool."}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
}
SAID = {"role": "tool", "tool_call_id": "c1", "content": "5"}
LONG = ("a long answer " * 100).strip()
TRACEBACK = "\n".join(f'  File "agent.py", line {number}, in step{number}' for number in range(40)) + "\nValueError: no"


def chat(number: int, messages: list[Any], answer: Any, **fields: Any) -> dict[str, Any]:
    """Return the fields of the span of a recorded call."""
    call = ModelCall(
        request_id=f"r{number}",
        dialect=fields.pop("dialect", "chat"),
        model="small",
        request={"messages": messages},
        response={"choices": [{"message": answer}]},
    )
    return {"name": "chat small", "call": call, **fields}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that records a rollout with the given spans in ``runs/agl.db`` of an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    (tmp_path / "runs").mkdir()

    async def write(store: Store, spans: tuple[dict[str, Any], ...], task: Any, error: ErrorInfo | None) -> None:
        await store.enqueue([Rollout(rollout_id="ro-shown", task=task)])
        (claim,) = await store.claim(worker="w")
        made = tuple(span(claim, number, **fields) for number, fields in enumerate(spans, 1))
        status = "failed" if error else "succeeded"
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status=status, spans=made, error=error)])

    def use(*spans: dict[str, Any], task: Any = "sum", error: ErrorInfo | None = None) -> None:
        async def main() -> None:
            store = SQLiteStore("sqlite:///runs/agl.db")
            try:
                await write(store, spans, task, error)
            finally:
                await store.close()

        asyncio.run(main())

    return use


async def rate(rollout_id: str, *, at: int) -> None:
    """Append a person's reward to a rollout that has finished."""
    store = SQLiteStore("sqlite:///runs/agl.db")
    ids = {"rollout_id": rollout_id, "attempt_id": f"{rollout_id}.1", "span_id": "f" * 16}
    reward = Reward(value=1.0, source="human")
    await store.append_spans([Span(**ids, name="evaluate", start_ns=at, end_ns=at, reward=reward)])
    await store.close()


def span(claim: Claim, number: int, **fields: Any) -> Span:
    ids = {"rollout_id": claim.rollout.rollout_id, "attempt_id": claim.attempt.attempt_id}
    return Span(**ids, **{"span_id": f"{number:016d}", "start_ns": number, "end_ns": number, **fields})


def shown(*options: str) -> list[str]:
    return [line.strip() for line in run("show", "latest", *options).output.splitlines()]


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, args, catch_exceptions=False)


def test_show_prints_messages_and_tool_calls_with_their_arguments(record: Callable[..., None]) -> None:
    record(chat(1, [ASKED], CALLED))
    lines = shown()
    start = lines.index("user: What is 2+3? Use the tool.")
    assert 'assistant calls add: {"a": 2, "b": 3}' == lines[start + 1]


def test_show_prints_each_message_of_a_conversation_once(record: Callable[..., None]) -> None:
    record(chat(1, [ASKED], CALLED), chat(2, [ASKED, {**CALLED, "content": ""}, SAID], {"content": "It is 5."}))
    lines = shown()
    assert 1 == lines.count("user: What is 2+3? Use the tool.")
    start = lines.index("continues 2 earlier messages")
    assert "message: It is 5." == lines[start + 1]


def test_show_prints_the_result_of_a_tool_below_its_call(record: Callable[..., None]) -> None:
    ran = {semconv.TOOL_NAME: "add", semconv.TOOL_ARGUMENTS: {"a": 2, "b": 3}, semconv.OPERATION: "execute_tool"}
    record(
        chat(1, [ASKED], CALLED),
        {"name": "execute_tool add", "attributes": ran},
        chat(3, [ASKED, CALLED, SAID], {"content": "It is 5."}),
    )
    lines = shown()
    start = lines.index('assistant calls add: {"a": 2, "b": 3}')
    assert "result: 5" == lines[start + 1]
    assert "tool: 5" not in lines
    assert not any(line.startswith("execute_tool add") for line in lines[: lines.index("")])


def test_show_prints_a_reward_and_its_feedback_at_the_call_that_it_is_about(record: Callable[..., None]) -> None:
    about = Reward(value=0.5, scope="span", span_id=f"{1:016d}", source="evaluator", feedback="too short")
    answer = {"role": "assistant", "content": "5"}
    record(chat(1, [ASKED], answer), {"name": "evaluate", "reward": about}, chat(3, [ASKED], answer))
    lines = shown()
    start = lines.index("assistant: 5")
    assert lines[start + 1].startswith("reward 0.5 by evaluator")
    assert "feedback: too short" == lines[start + 2]


def test_show_ends_with_a_time_line_without_what_came_after_the_attempt(record: Callable[..., None]) -> None:
    second = 1_000_000_000
    long = {"start_ns": second, "end_ns": 2 * second}
    record({"name": "whole", **long}, {"name": "late", "start_ns": 3 * second // 2, "end_ns": 2 * second})
    asyncio.run(rate("ro-shown", at=10_000 * second))
    lines = run("show", "latest").output.splitlines()
    start = lines.index("time line 1.000 s")
    assert ["█" * 20 + " whole 1.000 s", " " * 10 + "█" * 10 + " late 0.500 s"] == lines[start + 1 : start + 3]
    assert lines[start + 3].endswith("█ evaluate late")


def test_show_is_coloured_on_a_terminal_only(record: Callable[..., None]) -> None:
    record(chat(1, [ASKED], {"role": "assistant", "content": "5"}))
    coloured = CliRunner().invoke(cli, ("show", "latest"), color=True).output
    assert "\x1b[36massistant:\x1b[0m" in coloured
    assert run("show", "latest").output == click.unstyle(coloured)


def test_show_prints_what_tools_got_and_gave_and_why_a_reward_was_given(record: Callable[..., None]) -> None:
    attributes = {semconv.TOOL_NAME: "add", semconv.TOOL_ARGUMENTS: {"a": 2}, semconv.TOOL_RESULT: "5"}
    reward = Reward(value=0.0, feedback="the unit is missing")
    record({"name": "execute_tool add", "attributes": attributes}, {"name": "evaluate", "reward": reward})
    lines = shown()
    assert ['arguments: {"a":2}', "result: 5", "feedback: the unit is missing"] == [
        line for line in lines if line.startswith(("arguments", "result", "feedback"))
    ]


def test_show_cuts_long_texts_unless_all_is_asked_for(record: Callable[..., None]) -> None:
    text = f"{LONG}\nlast line"
    record(chat(1, [ASKED], {"role": "assistant", "content": text}), task={"q": LONG})
    cut = shown()
    assert f"assistant: {text[:200]}… ({len(text)} characters)" in cut
    assert "… texts are cut; --full shows them whole" == cut[-1]
    full = shown("--full")
    assert f"assistant: {LONG}" in full
    assert "last line" in full
    assert f"task: {json.dumps({'q': LONG}, separators=(',', ':'))}" in full
    assert not any("…" in line for line in full[2:])


def test_show_prints_the_stored_traceback_of_a_failed_attempt(record: Callable[..., None]) -> None:
    record(error=ErrorInfo(type="ValueError", message="no", traceback=TRACEBACK))
    cut = shown()
    assert ["ValueError: no", 'File "agent.py", line 39, in step39'] == [cut[-3], cut[-4]]
    assert "… (33 lines before)" in cut
    assert 'File "agent.py", line 0, in step0' not in cut
    assert 'File "agent.py", line 0, in step0' in shown("--full")


def test_show_cuts_long_lines_of_a_traceback(record: Callable[..., None]) -> None:
    record(error=ErrorInfo(type="ValueError", message="no", traceback=f"ValueError: {LONG}"))
    assert f"ValueError: {LONG}"[:200] + "…" in shown()
    assert f"ValueError: {LONG}" in shown("--full")


@pytest.mark.parametrize(
    ("messages", "answer", "expected"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "x"}]}], {}, 'user: one {"type":"x"}'),
        ([{"role": "user", "content": ["one", {"text": "two"}, 3]}], {}, "user: one two 3"),
        ([{"role": "user", "content": {"odd": 1}}], {}, 'user: {"odd":1}'),
        ([{"content": 3}], {}, "message: 3"),
        (["no message"], {"role": "assistant", "content": "fine"}, "assistant: fine"),
        ([ASKED], {"role": "assistant", "tool_calls": ["none", {"function": 3}]}, "assistant calls :"),
        ([ASKED], {"role": "assistant", "content": ""}, "assistant: (empty)"),
        ([ASKED], {"role": "assistant", "reasoning": "hm", "content": "5"}, "assistant thinks: hm"),
    ],
)
def test_show_prints_messages_of_any_shape(
    record: Callable[..., None], messages: list[Any], answer: Any, expected: str
) -> None:
    record(chat(1, messages, answer))
    assert expected in shown()


def test_show_prints_thoughts_under_two_names_once(record: Callable[..., None]) -> None:
    record(chat(1, [ASKED], {"role": "assistant", "reasoning": "hm", "reasoning_content": "hm", "content": "5"}))
    assert 1 == shown().count("assistant thinks: hm")


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202ekcab\r"


@pytest.mark.parametrize("command", [("show", "latest"), ("show", "latest", "--full"), ("why", "latest"), ("runs",)])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_terminal_sequences_in_texts_of_agents_are_shown_and_not_obeyed(
    record: Callable[..., None], command: tuple[str, ...], form: tuple[str, ...]
) -> None:
    record(
        chat(1, [{"role": f"user{EVIL}", "content": EVIL}], {"role": "assistant", "content": EVIL}),
        {"name": f"tool {EVIL}", "attributes": {semconv.TOOL_RESULT: EVIL, semconv.OUTPUT: EVIL}},
        task={"q": EVIL},
        error=ErrorInfo(type=f"Error{EVIL}", message=EVIL, traceback=EVIL),
    )
    output = run(*command, *form).output
    assert set() == {character for character in output if character in EVIL and not character.isprintable()}
    assert "owned" in output
    if not form and command[0] != "runs":
        assert "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x7f\\u202ekcab" in output


ID = "arithmetic-12-grpo-train-00017-00003-002"


def table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> list[str]:
    """Return the lines that a table takes on a terminal of ``width`` columns."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ("rollout", "experiment", "status", "reward", "task")
    row = (ID, "arithmetic-of-large-numbers", "succeeded", "0.75", "q" * 60)
    print_table(columns, [row, row], least=("task", "experiment"))
    return click.unstyle(capsys.readouterr().out).splitlines()


@pytest.mark.parametrize("width", [80, 60, 50, 40, 20])
def test_table_keeps_ids_whole_and_each_row_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lines = table(capsys, monkeypatch, width)
    assert [True, True] == [line.split()[0].endswith(ID) for line in lines[1:]]
    assert max(map(len, lines)) <= max(width, len(ID))


def test_table_shortens_other_columns_and_then_leaves_them_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [ID, "arithmet…", "succeeded", "0.75", "qqqqqqq…"] == table(capsys, monkeypatch, 80)[1].split()
    assert [ID, "succeeded", "0.75"] == table(capsys, monkeypatch, 60)[1].split()
    assert 5 == len(table(capsys, monkeypatch, 300)[1].split())


def test_table_names_the_columns_that_it_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    print_table(("rollout", "status", "task"), [(ID, "failed", "q")])
    assert "(no room for status, task: widen the terminal, or use --json)\n" == capsys.readouterr().err


AGL = """
import atexit
import sys
from pathlib import Path

from agl_inspect.terminal.program import main

atexit.register(lambda: sys.stderr.write(Path("/proc/self/status").read_text()))
main()
"""
"""A program that runs the command ``agl``, and at its end writes its ``/proc/self/status`` to standard error."""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the most memory of a process from /proc")
@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("show", "--json"),
        ("show", "--kind", "call"),
        ("show", "--agent", "solver"),
        ("data", "export", "--format", "spans", "--agent", "solver"),
        ("why",),
    ],
    ids=" ".join,
)
def test_rollout_of_many_long_calls_is_read_in_little_memory(record: Callable[..., None], command: tuple[str, ...]):
    messages = [{"role": "user", "content": f"{number}: {'x' * 1000}"} for number in range(400)]
    answer = {"role": "assistant", "content": "yes"}
    agent = {semconv.AGENT_NAME: "solver"}
    calls = [chat(number, messages[: number + 1], answer, attributes=agent) for number in range(350, 400)]
    record(*(call for call in calls for _ in range(6)))

    words = [sys.executable, "-c", AGL, *command, "ro-shown"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert len(done.stdout) > 30_000
    most_kib = next(int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("VmHWM"))
    assert most_kib / 1024 < 200


class Watched(MemoryStore):
    """A store that counts the spans that it has returned or searched."""

    seen = 0

    async def spans(self, *args: Any, **options: Any) -> list[Span]:
        found = await super().spans(*args, **options)
        self.seen += len(found)
        return found

    async def recordings(self, *args: Any, spans: Any = "deciding", **options: Any) -> list[Recording]:
        found = await super().recordings(*args, spans=spans, **options)
        every = replace(spans, agent="", kind="", limit=100_000) if isinstance(spans, SpanQuery) else "all"
        whole = await super().recordings(*args, spans=every, **options)
        self.seen += sum(len(recording.spans) for recording in whole)
        return found


def in_teams(claim: Claim, count: int) -> list[Span]:
    """Return calls of two agents in turn, each inside a node of its agent."""
    agents = [span(claim, at, name="agent", attributes={semconv.AGENT_NAME: f"solver{at}"}) for at in (1, 2)]
    nodes = [
        span(claim, at + 2, parent_id=agent.span_id, attributes={semconv.NODE: "node"}, name="node")
        for at, agent in enumerate(agents, 1)
    ]
    calls = [span(claim, at, parent_id=nodes[at % 2].span_id, **chat(at, [ASKED], SAID)) for at in range(5, 5 + count)]
    return [*agents, *nodes, *calls]


def test_spans_of_an_agent_are_found_without_looking_through_the_rollout_for_each_page() -> None:
    async def body() -> None:
        store = Watched()
        await store.enqueue([Rollout(rollout_id="ro-many", task=1)])
        (claim,) = await store.claim(worker="w")
        spans = in_teams(claim, 600)
        await store.append_spans(spans)
        for query in (SpanQuery(agent="solver2"), SpanQuery(agent="solver1", kind="call"), SpanQuery(agent="no")):
            (expected,) = await store.recordings(RolloutQuery(ids=("ro-many",)), spans=replace(query, limit=1000))
            store.seen = 0
            reader = SpanReader(store, "ro-many", None, chosen=query)
            found = [each async for each in reader]
            assert expected.spans == found
            assert found == [await reader.at(each.sequence) for each in found]
            assert store.seen <= 4 * len(spans) or query.kind
            assert expected.spans[7:] == [each async for each in reader.behind(found[6].sequence if found else 0)]

    asyncio.run(body())
