"""Importing files that the libraries of Langfuse, LangSmith and MLflow wrote, run by the scripts next to the files."""

import json
from pathlib import Path
from typing import Any

import pytest

from agl.dialects import call_messages
from agl.errors import DatasetError
from agl.schemas import Span

from .conftest import Imports
from .logs import write_lines

RECORDED = Path(__file__).parent / "recorded"
FILES = {
    "langfuse.pb.gz": ("otlp", None),
    "langfuse-batch.json": ("langfuse", 0.75),
    "langfuse-trace.json": ("langfuse", 0.75),
    "langsmith.jsonl": ("langsmith", 0.75),
    "mlflow.json": ("mlflow", 0.75),
}


def calls_of(imports: Imports) -> list[Span]:
    (recording,) = imports.recordings()
    return sorted((span for span in recording.spans if span.call), key=lambda span: span.start_ns)


@pytest.mark.parametrize("name", FILES)
def test_trace_that_a_library_wrote_becomes_a_rollout(name: str, imports: Imports) -> None:
    form, reward = FILES[name]
    done = imports(RECORDED / name)
    first, second = [span.call for span in calls_of(imports) if span.call]

    assert ({form: 1}, 1, 2, {"guide": 1}) == (done.files, done.rollouts, done.calls, done.agents)
    asked = ["system", "user", "assistant"]
    assert asked == [message["role"] for message in call_messages(first)]
    assert [*asked, "tool", "assistant"] == [message["role"] for message in call_messages(second)]
    assert '{"city": "Oslo"}' == call_messages(first)[-1]["tool_calls"][0]["function"]["arguments"]
    assert "It will rain." == call_messages(second)[-1]["content"]
    assert "weather" == first.request["tools"][0]["function"]["name"]
    assert 0.5 == first.sampling.temperature
    assert first.model.startswith("gpt-6")
    (recording,), (episode,) = imports.recordings(), imports.episodes()
    assert ({"prompt": "Will it rain in Oslo?"}, reward) == (recording.rollout.task, episode.reward)
    assert ["guide", "guide"] == [call.agent for call in episode.transitions]
    assert recording.rollout.finished_at > recording.rollout.created_at > 1_790_000_000
    assert (0, 1, 0, 0) == _counts(imports(RECORDED / name))


def _counts(done: Any) -> tuple[int, int, int, int]:
    return done.rollouts, done.known, done.changed, done.rewards


@pytest.mark.parametrize(
    ("name", "words"), [("langfuse.pb.gz", "yes"), ("langsmith.jsonl", "yes"), ("mlflow.json", "yes")]
)
def test_tool_has_its_arguments_and_its_result(name: str, words: str, imports: Imports) -> None:
    imports(RECORDED / name)
    (recording,) = imports.recordings()
    (tool,) = [span for span in recording.spans if span.attributes.get("gen_ai.tool.name") == "weather"]

    assert "Oslo" in tool.attributes["gen_ai.tool.call.arguments"]
    assert words == tool.attributes["gen_ai.tool.call.result"]


def test_counts_of_tokens_are_kept(imports: Imports) -> None:
    imports(RECORDED / "langsmith.jsonl")

    assert [11, 11] == [span.attributes["gen_ai.usage.input_tokens"] for span in calls_of(imports)]


@pytest.mark.parametrize(
    "outputs",
    [
        {
            "generations": [
                [
                    {
                        "message": {
                            "kwargs": {
                                "content": "Sunny.",
                                "usage_metadata": {
                                    **{"input_tokens": 1112, "output_tokens": 30},
                                    "input_token_details": {"cache_read": 1000},
                                },
                            }
                        }
                    }
                ]
            ]
        },
        {
            "generations": [[{"text": "Sunny."}]],
            "llm_output": {
                "token_usage": {
                    **{"prompt_tokens": 1112, "completion_tokens": 30},
                    "prompt_tokens_details": {"cached_tokens": 1000},
                }
            },
        },
    ],
    ids=["usage_metadata", "llm_output"],
)
def test_counts_of_tokens_are_found_where_langchain_puts_them(tmp_path: Path, imports: Imports, outputs: Any) -> None:
    lines = [json.loads(line) for line in (RECORDED / "langsmith.jsonl").read_text().splitlines()]
    for run in lines:
        if run.get("run_type") == "llm":
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                run.pop(name, None)
            run["outputs"] = outputs
            run["extra"]["metadata"].pop("usage_metadata", None)
    imports(write_lines(tmp_path / "runs.jsonl", lines))

    names = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens")
    assert [(1112, 30, 1000)] * 2 == [tuple(span.attributes[name] for name in names) for span in calls_of(imports)]


def test_folder_of_all_formats_is_imported_at_once(imports: Imports) -> None:
    done = imports(RECORDED)

    assert {"otlp": 1, "langfuse": 2, "langsmith": 1, "mlflow": 1} == done.files
    assert (4, 1) == (done.rollouts, done.tasks)  # the trace of Langfuse 2 is there twice


def test_feedback_that_comes_later_is_a_late_reward(tmp_path: Path, imports: Imports) -> None:
    lines = [json.loads(line) for line in (RECORDED / "langsmith.jsonl").read_text().splitlines()]
    first = imports(write_lines(tmp_path / "runs.jsonl", lines[:-1]))
    second = imports(write_lines(tmp_path / "runs.jsonl", lines))

    assert (1, 0) == (first.rollouts, first.rewards)
    assert (0, 1, 0, 1) == _counts(second)
    (reward,) = imports.episodes()[0].rewards
    assert (0.75, "helpful", "good") == (reward.value, reward.name, reward.feedback)


def test_mean_of_feedback_stands_in_for_feedback(tmp_path: Path, imports: Imports) -> None:
    lines = [json.loads(line) for line in (RECORDED / "langsmith.jsonl").read_text().splitlines()][:-1]
    lines[0]["feedback_stats"] = {"helpful": {"n": 2, "avg": 0.5}, "tone": {"n": 1, "avg": None, "values": {"kind": 1}}}
    done = imports(write_lines(tmp_path / "runs.jsonl", lines))

    assert (1, 1) == (done.rewards, done.lost["feedback that is not a number: its text is kept, without a value"])
    assert 0.5 == imports.episodes()[0].reward


def test_feedback_of_one_name_is_kept_for_each_run_and_each_person(tmp_path: Path, imports: Imports) -> None:
    lines = [json.loads(line) for line in (RECORDED / "langsmith.jsonl").read_text().splitlines()]
    runs, feedback = lines[:-1], lines[-1]
    calls = [run["id"] for run in runs if run["run_type"] == "llm"]
    runs[0]["feedback_stats"] = {"helpful": {"n": 2, "avg": 0.5}}
    given = [(runs[0]["id"], 0.75), (runs[0]["id"], 0.25), *((call, 1.0) for call in calls)]
    told = [{**feedback, "id": str(n), "run_id": own, "score": score} for n, (own, score) in enumerate(given)]
    done = imports(write_lines(tmp_path / "runs.jsonl", [*runs, *told]))

    assert 2 + len(calls) == done.rewards
    found = [(reward.scope, reward.value) for reward in imports.episodes()[0].rewards]
    assert sorted([("rollout", 0.75), ("rollout", 0.25), *[("turn", 1.0)] * len(calls)]) == sorted(found)


def test_run_that_a_file_has_twice_is_counted_once(tmp_path: Path, imports: Imports) -> None:
    lines = [json.loads(line) for line in (RECORDED / "langsmith.jsonl").read_text().splitlines()]
    done = imports(write_lines(tmp_path / "runs.jsonl", [*lines, *lines]))

    assert (1, 2, 1) == (done.rollouts, done.calls, done.rewards)
    assert 2 == sum(count for text, count in done.lost.items() if text.startswith("calls without token ids"))


def test_runs_of_langchain_have_its_messages_in_the_form_of_chat(tmp_path: Path, imports: Imports) -> None:
    def said(kind: str, **fields: Any) -> dict[str, Any]:
        return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind], "kwargs": fields}

    asked = [said("SystemMessage", content="Be short."), said("HumanMessage", content="Will it rain?")]
    called = {"name": "weather", "args": {"city": "Oslo"}, "id": "c1", "type": "tool_call"}
    answer = {"text": "", "message": said("AIMessageChunk", content="", tool_calls=[called])}
    own = "20260501T100000000000Z00000000-0000-0000-0000-000000000001"
    node = {"metadata": {"langgraph_node": "write"}}
    ids = [f"00000000-0000-0000-0000-00000000000{number}" for number in range(1, 4)]
    common = {"dotted_order": own, "start_time": "2026-05-01T10:00:00", "end_time": "2026-05-01T10:00:01"}
    runs = [
        {"id": ids[0], "name": "LangGraph", "run_type": "chain", **common},
        {"id": ids[1], "name": "write", "run_type": "chain", "parent_run_id": ids[0], "extra": node, **common},
        {
            "id": ids[2],
            "name": "ChatOpenAI",
            "run_type": "llm",
            "parent_run_id": ids[1],
            "extra": {**node, "invocation_params": {"model": "gpt-6", "tools": [{"type": "function"}]}},
            "inputs": {"messages": [asked]},
            "outputs": {"generations": [[answer]]},
            **common,
        },
    ]
    done = imports(write_lines(tmp_path / "runs.json", [{"runs": runs, "cursors": {}}]))
    (span,) = calls_of(imports)

    assert ({"langsmith": 1}, {"write": 1}) == (done.files, done.agents)
    assert span.call is not None
    system, user, assistant = call_messages(span.call)
    assert ("Be short.", "user", "Will it rain?") == (system["content"], user["role"], user["content"])
    assert {"name": "weather", "arguments": '{"city":"Oslo"}'} == assistant["tool_calls"][0]["function"]
    assert ("gpt-6", [{"type": "function"}]) == (span.call.model, span.call.request["tools"])


def test_rows_of_langfuse_exports_become_one_run_a_trace(tmp_path: Path, imports: Imports) -> None:
    row = {"trace_id": "t1", "trace_name": "guide", "start_time": "2024-05-29 13:46:19.963000", "level": "DEFAULT"}
    rows = [
        {
            **row,
            "id": "o1",
            "type": "GENERATION",
            "name": "model",
            "input": '[{"role": "user", "content": "Will it rain?"}]',
            "output": '{"role": "assistant", "content": "Yes"}',
            "provided_model_name": "gpt-6",
            "usage_details": {"input": 3, "output": 1},
        },
        {"id": "s1", "trace_id": "t1", "name": "tone", "value": None, "string_value": "kind", "source": "ANNOTATION"},
        {"id": "s2", "trace_id": "t1", "observation_id": "o1", "name": "right", "value": 1, "source": "EVAL"},
        {"id": "s3", "trace_id": None, "session_id": "x", "name": "right", "value": 1, "source": "API"},
    ]
    done = imports(write_lines(tmp_path / "export.jsonl", rows))
    (span,) = calls_of(imports)

    assert ({"langfuse": 1}, 1, 2) == (done.files, done.rollouts, done.rewards)
    assert 1 == done.lost["scores that are not numbers: their text is kept as feedback, without a value"]
    assert 1 == done.lost["scores of sessions or of data sets, which are about no trace: left out"]
    assert "traces without a model call: left out" not in done.lost
    assert ("gpt-6", 3) == (span.call and span.call.model, span.attributes["gen_ai.usage.input_tokens"])
    tone, right = sorted(imports.episodes()[0].rewards, key=lambda reward: reward.value or 0)
    assert ("kind", "human") == (tone.feedback, tone.source)
    assert (1.0, "turn", span.span_id) == (right.value, right.scope, right.span_id)


def test_words_of_a_judge_of_mlflow_are_numbers_and_what_it_replaced_is_left_out(
    tmp_path: Path, imports: Imports
) -> None:
    trace = json.loads((RECORDED / "mlflow.json").read_text())
    given = trace["info"]["assessments"][0]
    trace["info"]["assessments"] = [
        {**given, "feedback": {"value": "yes"}},
        {**given, "assessment_id": "a-2", "valid": False},
        {**given, "assessment_id": "a-3", "assessment_name": "tone", "feedback": {"value": "kind"}},
    ]
    done = imports(write_lines(tmp_path / "trace.jsonl", [trace]))

    assert 2 == done.rewards
    found = {reward.name: (reward.value, reward.feedback) for reward in imports.episodes()[0].rewards}
    assert {"helpful": (1.0, "good"), "tone": (None, "kind: good")} == found


def test_bodies_of_another_api_stay_in_its_dialect(tmp_path: Path, imports: Imports) -> None:
    common = {"start_time": "2026-05-01T10:00:00Z", "run_type": "llm", "trace_id": "t"}
    given = {"model": "claude-5", "messages": [{"role": "user", "content": "Hello"}], "system": "Be short."}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Hi"}], "model": "claude-5"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}
    runs = [
        {"id": "t", "name": "Anthropic", "inputs": given, "outputs": answer, **common},
        {
            "id": "u",
            "name": "Responses",
            "parent_run_id": "v",
            "inputs": {"model": "gpt-6", "input": "Hello"},
            "outputs": {"object": "response", "output": [said]},
            **common,
        },
    ]
    imports(write_lines(tmp_path / "runs.jsonl", runs))

    found = {span.call.dialect: call_messages(span.call)[-1]["content"] for span in calls_of(imports) if span.call}
    assert {"messages": "Hi", "responses": "Hi"} == {
        name: content if isinstance(content, str) else content[0]["text"] for name, content in found.items()
    }


@pytest.mark.parametrize(
    "answer",
    [None, {}, {"other": 1}, 3, [], "[" * 900 + "]" * 900, {"output": {"output": {"output": []}}}],
    ids=["none", "empty", "unknown", "number", "list", "deep", "nested"],
)
def test_call_without_an_answer_is_a_call(answer: Any, tmp_path: Path, imports: Imports) -> None:
    call = {"id": "a", "run_type": "llm", "start_time": "9999-12-31T23:59:59", "error": "ReadTimeout"}
    done = imports(
        write_lines(tmp_path / "runs.jsonl", [{**call, "inputs": {"prompts": ["Hello"]}, "outputs": answer}])
    )
    (span,) = calls_of(imports)

    assert (1, {"prompt": "Hello"}) == (done.calls, imports.recordings()[0].rollout.task)
    assert span.call is not None
    assert ("ReadTimeout", False) == (span.call.error, span.call.is_complete)
    assert "failed" == imports.recordings()[0].rollout.status


def test_attribute_that_holds_the_messages_of_a_call_is_not_kept_twice(imports: Imports) -> None:
    imports(RECORDED / "langfuse.pb.gz")

    assert not [name for span in calls_of(imports) for name in span.attributes if name.endswith((".input", ".output"))]


@pytest.mark.parametrize(
    ("form", "record", "says"),
    [
        ("langsmith", {"id": "a"}, "line 1 is neither a run nor feedback of LangSmith, and nothing was imported"),
        ("langsmith", {"id": "", "run_type": "llm"}, "line 1 is a run without its id or that of its trace"),
        ("langfuse", {"id": "a"}, "line 1 is not a trace, observation, score or batch of events of Langfuse"),
        ("langfuse", {"observations": []}, "line 1 is a trace without an id, and nothing was imported"),
        ("langfuse", {"id": "a", "observations": ["b"]}, "line 1 names its observations and does not hold them"),
        ("mlflow", {"info": {}, "data": {"spans": []}}, "line 1 is not a trace of MLflow 3 .* nothing was imported"),
        ("mlflow", {"info": {"trace_id": "a"}, "data": {"spans": [{"context": {}}]}}, "as MLflow 2 wrote them"),
    ],
)
def test_record_of_another_kind_is_refused(
    form: str, record: dict[str, Any], says: str, tmp_path: Path, imports: Imports
) -> None:
    with pytest.raises(DatasetError, match=says) as refused:
        imports(write_lines(tmp_path / "a.jsonl", [record]), form=form)
    assert "\n" not in str(refused.value)
    assert [] == imports.recordings()
