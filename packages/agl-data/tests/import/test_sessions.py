"""Importing session logs of Claude Code and Codex: calls, tools, sub-agents, times, and data that the logs lack."""

import json
from pathlib import Path

import pytest

from agl.contracts import Recording
from agl.dialects import call_messages
from agl.errors import DatasetError
from agl.schemas import Span

from .conftest import Imports
from .logs import ClaudeLog, claude_session, codex_session, result, text, use, write_lines


def calls_of(recording: Recording) -> list[Span]:
    return sorted((span for span in recording.spans if span.call), key=lambda span: span.start_ns)


def tools_of(recording: Recording) -> dict[str, str]:
    tools = (span for span in recording.spans if span.name.startswith("execute_tool"))
    return {str(span.attributes["gen_ai.tool.call.id"]): span.status for span in tools}


def test_claude_session_becomes_one_rollout_with_its_agents_calls_and_tools(tmp_path: Path, imports: Imports) -> None:
    done = imports(claude_session(tmp_path / "logs" / "session.jsonl"))
    (recording,) = imports.recordings()

    assert (1, {"claude-code": 1}, 4) == (done.rollouts, done.files, done.calls)
    assert {"prompt": "Mend the tests"} == recording.rollout.task
    assert {"toolu_1": "ok", "toolu_2": "error", "toolu_3": "ok"} == tools_of(recording)
    (episode,) = imports.episodes()
    by_agent = [(call.agent, call.path) for call in episode.transitions]
    assert [("claude-code", ("claude-code",))] * 3 == [each for each in by_agent if each[0] == "claude-code"]
    assert [("Explore", ("claude-code", "Agent", "Explore"))] == [each for each in by_agent if each[0] == "Explore"]


def test_blocks_of_a_claude_answer_are_one_call_and_its_parallel_results_one_request(
    tmp_path: Path, imports: Imports
) -> None:
    imports(claude_session(tmp_path / "logs" / "session.jsonl"))
    first, second, *_ = [span.call for span in calls_of(imports.recordings()[0])]

    assert first is not None
    assert second is not None
    assert ["thinking", "tool_use", "tool_use"] == [block["type"] for block in first.response["content"]]
    assert ["user", "user", "assistant", "tool", "tool", "assistant"] == [
        message["role"] for message in call_messages(second)
    ]
    assert (12, 34) == (second.response["usage"]["input_tokens"], second.response["usage"]["output_tokens"])


def test_claude_times_are_those_of_the_log(tmp_path: Path, imports: Imports) -> None:
    imports(claude_session(tmp_path / "logs" / "session.jsonl"))
    (recording,) = imports.recordings()

    assert 1777629601.5 == recording.rollout.created_at
    assert recording.rollout.finished_at > recording.rollout.created_at
    first = calls_of(recording)[0]
    assert (1777629602_500_000_000, 1777629605_500_000_000) == (first.start_ns, first.end_ns)


def test_claude_rewind_starts_a_branch_and_a_compaction_a_new_conversation(tmp_path: Path, imports: Imports) -> None:
    log = ClaudeLog()
    asked = log.ask("Write a poem")
    log.answer(1, [text("Roses")])
    log.rewind(asked)
    log.answer(2, [text("Violets")])
    log.rewind(None)
    log.add("system", None, subtype="compact_boundary", logicalParentUuid="main-003")
    log.ask("The poem so far: Violets", isCompactSummary=True)
    log.answer(3, [text("are blue")])
    imports(write_lines(tmp_path / "log.jsonl", log.lines))

    said = [[m["content"] for m in call_messages(span.call)] for span in calls_of(imports.recordings()[0]) if span.call]
    assert [["Write a poem", "Roses"], ["Write a poem", "Violets"], ["The poem so far: Violets", "are blue"]] == said


def test_claude_side_chains_of_one_file_are_named_by_the_prompt_that_started_them(
    tmp_path: Path, imports: Imports
) -> None:
    log = ClaudeLog()
    log.ask("Mend it")
    log.answer(1, [use("toolu_9", "Task", subagent_type="reviewer", prompt="Review it")], "tool_use")
    side = ClaudeLog(agent="x", first=10)
    side.ask("Review it")
    side.answer(1, [text("Fine")])
    for line in side.lines:
        del line["agentId"]
    log.ask([result("toolu_9", "Fine")])
    imports(write_lines(tmp_path / "log.jsonl", [*log.lines, *side.lines]))

    (episode,) = imports.episodes()
    assert {"claude-code", "reviewer"} == {call.agent for call in episode.transitions}


def test_claude_side_chain_that_no_tool_started_belongs_to_the_main_agent(tmp_path: Path, imports: Imports) -> None:
    log = ClaudeLog()
    log.ask("Mend it")
    log.answer(1, [use("toolu_1", "Bash", command="ls")], "tool_use")
    log.ask([result("toolu_1", "a.py")])
    side = ClaudeLog(agent="x", first=10)
    side.ask("Warm up")
    side.answer(1, [use("toolu_2", "Read", path="a.py")], "tool_use")
    side.ask([result("toolu_2", "text")])
    side.answer(2, [text("Done")])
    imports(write_lines(tmp_path / "log.jsonl", [*log.lines, *side.lines]))

    (episode,) = imports.episodes()
    paths = {call.path for call in episode.transitions}
    assert {("claude-code",), ("claude-code", "sub-agent")} == paths


def test_claude_session_that_ends_in_an_error_of_the_api_failed(tmp_path: Path, imports: Imports) -> None:
    log = ClaudeLog()
    log.ask("Hello")
    log.answer(1, [text("Hi")])
    log.ask("More")
    broken = {"id": "x", "model": "<synthetic>", "role": "assistant", "content": [text("API Error: overloaded")]}
    log.add("assistant", broken, isApiErrorMessage=True)
    imports(write_lines(tmp_path / "log.jsonl", log.lines))

    (recording,) = imports.recordings()
    assert "failed" == recording.rollout.status
    assert recording.attempts[0].error is not None
    assert "API Error: overloaded" == recording.attempts[0].error.message
    assert 1 == len(calls_of(recording))


def test_claude_session_that_went_on_stays_as_it_was_and_is_named(tmp_path: Path, imports: Imports) -> None:
    log = ClaudeLog()
    log.ask("Hello")
    log.answer(1, [text("Hi")])
    path = write_lines(tmp_path / "log.jsonl", log.lines)
    imports(path)
    log.ask("More")
    log.answer(2, [text("Yes")])
    done = imports(write_lines(path, log.lines))

    assert (0, 1, 1) == (done.rollouts, done.known, done.changed)
    assert 1 == len(calls_of(imports.recordings()[0]))


@pytest.mark.parametrize("between", [0, 201])
def test_session_in_two_files_is_imported_from_the_first_and_named(
    between: int, tmp_path: Path, imports: Imports
) -> None:
    log = ClaudeLog()
    log.ask("Hello")
    log.answer(1, [text("Hi")])
    first = write_lines(tmp_path / "a.jsonl", log.lines)
    others = [
        write_lines(tmp_path / f"b{n}.jsonl", [{**line, "sessionId": f"other-{n}"} for line in log.lines])
        for n in range(between)
    ]
    log.ask("More")
    log.answer(2, [text("Yes")])
    done = imports(first, *others, write_lines(tmp_path / "c.jsonl", log.lines))

    assert (1 + between, 1, 1) == (done.rollouts, done.known, done.changed)
    assert {1} == {len(calls_of(recording)) for recording in imports.recordings()}


def test_log_of_a_sub_agent_that_links_out_of_the_session_is_left_out(tmp_path: Path, imports: Imports) -> None:
    path = claude_session(tmp_path / "logs" / "session.jsonl")
    log = path.with_suffix("") / "subagents" / "agent-abc123.jsonl"
    elsewhere = log.rename(tmp_path / "elsewhere.jsonl")
    log.symlink_to(elsewhere)

    done = imports(path)
    assert 3 == done.calls
    assert 1 == done.lost["logs of sub-agents that are links out of the session's folder: left out"]


def test_folder_of_sessions_takes_the_logs_of_sub_agents_with_their_session(tmp_path: Path, imports: Imports) -> None:
    claude_session(tmp_path / "projects" / "repo" / "session.jsonl")
    (tmp_path / "projects" / "repo" / "notes.json").write_text('{"a": 1}')

    done = imports(tmp_path / "projects")
    assert ({"claude-code": 1}, 1) == (done.files, done.rollouts)
    assert 1 == done.lost["files of a folder that are in no known format: left out"]


def test_codex_session_becomes_one_call_for_each_counted_answer(tmp_path: Path, imports: Imports) -> None:
    done = imports(codex_session(tmp_path / "rollout-2026.jsonl"))
    (recording,) = imports.recordings()
    calls = calls_of(recording)

    assert ({"codex": 1}, 3, {"codex": 1}) == (done.files, done.calls, done.agents)
    assert {"prompt": "Add a Dockerfile"} == recording.rollout.task
    assert {"call_1": "ok", "call_2": "ok"} == tools_of(recording)
    first, second, third = [span.call for span in calls if span.call is not None]
    assert ["reasoning", "function_call", "function_call"] == [item["type"] for item in first.response["output"]]
    assert {"gpt-6"} == {first.model, second.model, third.model}
    assert [100, 150, 30] == [span.attributes["gen_ai.usage.input_tokens"] for span in calls]
    roles = [message["role"] for message in call_messages(second)]
    assert ["system", "user", "user", "assistant", "tool", "tool", "assistant"] == roles
    assert 1 == done.lost["answers with encrypted reasoning, which only its provider reads"]


def test_codex_compaction_begins_a_new_conversation(tmp_path: Path, imports: Imports) -> None:
    imports(codex_session(tmp_path / "rollout-2026.jsonl"))
    last = calls_of(imports.recordings()[0])[-1].call

    assert last is not None
    said = [message["content"] for message in call_messages(last)]
    assert ["You are Codex.", "The Dockerfile is written.", "Thanks", "You are welcome."] == said


def test_codex_call_starts_where_it_was_asked_for_whatever_is_counted_before_its_answer(
    tmp_path: Path, imports: Imports
) -> None:
    path = codex_session(tmp_path / "rollout-2026.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    asked = next(n for n, line in enumerate(lines) if line["timestamp"][17:19] == "10")
    again = next(line for line in lines if line["payload"].get("type") == "token_count")
    imports(write_lines(path, [*lines[: asked + 1], again, *lines[asked + 1 :]]))

    last = calls_of(imports.recordings()[0])[-1]
    assert 1_000_000_000 == last.end_ns - last.start_ns


@pytest.mark.parametrize("write", [claude_session, codex_session], ids=["claude-code", "codex"])
def test_log_that_is_cut_in_a_line_is_refused_with_its_place(write, tmp_path: Path, imports: Imports) -> None:
    path = write(tmp_path / "log.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    last = len(path.read_text().splitlines())

    with pytest.raises(DatasetError, match=f"log.jsonl, line {last} is not JSON .*nothing was imported"):
        imports(path)
    assert [] == imports.recordings()
