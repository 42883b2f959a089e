"""Each format writes all the data that it can hold, and counts the rest as losses."""

import io
import json
from typing import Any

import pytest
from atif import Trajectory

from agl import semconv
from agl.contracts import Recording
from agl.errors import ConfigError
from agl.schemas import ModelCall, Reward, Span, pack_floats, pack_ids
from agl.tracing import make_reward_span

from .conftest import export
from .worlds import START_NS, call_span, recording_of, replaced

TOOLS = [{"type": "function", "function": {"name": "ask_writer", "parameters": {"type": "object"}}}]


def call(prompt: list[int], ids: list[int], messages: list[Any], said: Any, **fields: Any) -> ModelCall:
    known: dict[str, Any] = {
        "prompt_ids": pack_ids(prompt),
        "response_ids": pack_ids(ids),
        "logprobs": pack_floats([-0.5] * len(ids)),
        "policy": "main",
    }
    request = {"messages": messages, "tools": TOOLS}
    response = {"choices": [{"index": 0, "message": said}], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    known |= {"request": request, "response": response, **fields}
    return ModelCall(request_id=f"r{prompt}", dialect="chat", model="small", **known)


def team() -> Recording:
    """Return a rollout in which a planner calls a writer through a tool, and continues with the answer."""
    asked = {"role": "user", "content": "2 + 2?"}
    function = {"name": "ask_writer", "arguments": '{"text": "2 + 2"}'}
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "t1", "content": "4"}

    def own(number: int, name: str, parent: int, **attributes: Any) -> Span:
        span = Span(rollout_id="ro-1", attempt_id="ro-1.1", span_id=f"{number:016x}", name=name)
        return replaced(span, parent_id=f"{parent:016x}" if parent else None, attributes=attributes)

    agent = {semconv.OPERATION: semconv.OP_INVOKE_AGENT}
    tool = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: "ask_writer", semconv.TOOL_CALL_ID: "t1"}
    first = call([1, 2], [3, 4], [asked], said)
    second = call([7], [8], [{"role": "user", "content": "2 + 2"}], {"role": "assistant", "content": "4"})
    third = call([1, 2, 3, 4, 5], [6], [asked, said, result], {"role": "assistant", "content": "It is 4."})
    scored = make_reward_span("ro-1", "ro-1.1", Reward(value=1.0, source="evaluator", feedback="right"))
    spans = [
        own(1, semconv.ROOT_SPAN_NAME, 0),
        own(2, "invoke_agent planner", 1, **agent, **{semconv.AGENT_NAME: "planner"}),
        replaced(call_span(f"{3:016x}", first, parent=f"{2:016x}", at_ns=0), attributes={"agl.cost_usd": 0.25}),
        own(4, "execute_tool ask_writer", 2, **tool),
        own(5, "invoke_agent writer", 4, **agent, **{semconv.AGENT_NAME: "writer"}),
        call_span(f"{6:016x}", second, parent=f"{5:016x}", at_ns=0),
        call_span(f"{7:016x}", third, parent=f"{2:016x}", at_ns=0),
        replaced(scored, span_id=f"{8:016x}"),
    ]
    timed = [
        replaced(span, sequence=n, start_ns=START_NS + n * 1_500_000, end_ns=START_NS + n * 1_500_000 + 9)
        for n, span in enumerate(spans, start=1)
    ]
    return recording_of(timed)


def lines_of(form: str, *recordings: Recording) -> list[Any]:
    return [json.loads(line) for line in export(form, recordings).data.splitlines()]


def test_trajectory_has_tokens_tools_costs_and_sub_agents_where_they_were_asked() -> None:
    (line,) = lines_of("atif", team())
    made = Trajectory.model_validate(line)
    sub = (made.subagent_trajectories or [])[0]
    user, first, last = made.steps

    assert ("ATIF-v1.8", "planner", "writer") == (made.schema_version, made.agent.name, sub.agent.name)
    assert TOOLS == made.agent.tool_definitions
    assert ("2 + 2?", "", "It is 4.") == (user.message, first.message, last.message)
    assert ([1, 2], [3, 4], [-0.5, -0.5]) == (
        first.metrics.prompt_token_ids,
        first.metrics.completion_token_ids,
        first.metrics.logprobs,
    )
    assert (0.25, 9, 2) == (first.metrics.cost_usd, first.metrics.prompt_tokens, first.metrics.completion_tokens)
    assert {"text": "2 + 2"} == first.tool_calls[0].arguments
    (result,) = first.observation.results
    assert ("t1", "4", sub.trajectory_id) == (
        result.source_call_id,
        result.content,
        result.subagent_trajectory_ref[0].trajectory_id,
    )
    assert 1.0 == line["extra"]["agl"]["reward"] == line["extra"]["agl"]["rewards"][0]["value"]
    assert 0.25 == made.final_metrics.total_cost_usd


def test_message_of_another_branch_is_copied_context() -> None:
    given = {"role": "assistant", "content": "an example"}
    asked = {"role": "user", "content": "go on"}
    found = call([1], [2], [given, asked], {"role": "assistant", "content": "yes"})
    (line,) = lines_of("atif", recording_of([call_span("0" * 15 + "1", found, parent="", at_ns=START_NS)]))
    steps = Trajectory.model_validate(line).steps

    assert [True, None, None] == [step.is_copied_context for step in steps]


def test_tool_calls_and_costs_of_any_form_end_no_export() -> None:
    said = {"role": "assistant", "content": "yes", "tool_calls": [None, "x", {"id": 1, "function": 2}]}
    found = call([1], [2], [{"role": "user", "content": "go on"}], said)
    span = call_span("0" * 15 + "1", found, parent="", at_ns=START_NS)
    (line,) = lines_of("atif", recording_of([replaced(span, attributes={"agl.cost_usd": "0.25"})]))
    (step,) = [step for step in Trajectory.model_validate(line).steps if step.source == "agent"]

    assert (["1"], None) == ([each.tool_call_id for each in step.tool_calls], step.metrics.cost_usd)


def test_losses_name_what_a_format_leaves_behind() -> None:
    spans = list(team().spans)
    broken = call([1], [2], [], None, response=None, error="refused", status_code=500)
    spans.append(call_span("f" * 16, broken, parent="", at_ns=START_NS + 99))
    lost = {form: export(form, [recording_of(spans)]).lost for form in ("atif", "verl", "tinker", "langfuse", "otlp")}

    assert 1 == lost["atif"]["model calls that failed: left out"] == lost["verl"]["model calls that failed: left out"]
    assert 3 == sum(count for what, count in lost["atif"].items() if what.startswith("spans of agents"))
    assert 3 == sum(count for what, count in lost["tinker"].items() if "token ids stand for them" in what)
    assert ({}, {}) == (lost["langfuse"], lost["otlp"])


@pytest.mark.parametrize("form", ["verl", "tinker"])
def test_texts_without_ids_are_refused_where_ids_are_the_format(form: str) -> None:
    text = {"prompt_ids": b"", "response_ids": b"", "logprobs": b"", "ids_missing": "text"}
    found = call([], [], [{"role": "user", "content": "a"}], {"role": "assistant", "content": "b"}, **text)
    recording = recording_of([call_span("0" * 15 + "1", found, parent="", at_ns=START_NS)])
    with pytest.raises(ConfigError, match=f"the 1 model calls to export have no token ids, which {form} is made of"):
        export(form, [recording])
    both = export(form, [recording, team()])
    assert (2, 1) == (both.records, both.lost["model calls without token ids: left out"])


@pytest.mark.parametrize("form", ["atif", "langfuse", "otlp"])
def test_log_probabilities_that_json_cannot_carry_are_left_out_and_counted(form: str) -> None:
    endless = {"logprobs": pack_floats([float("-inf"), -1.0])}
    found = call([1], [2, 3], [{"role": "user", "content": "a"}], {"role": "assistant", "content": "b"}, **endless)
    made = export(form, [recording_of([call_span("0" * 15 + "1", found, parent="", at_ns=START_NS)])])

    assert 1 == sum(count for what, count in made.lost.items() if what.startswith("calls with log-probabilities"))
    assert b"null" not in made.data.replace(b'"content":null', b"")


@pytest.mark.parametrize("form", ["atif", "langfuse", "otlp"])
def test_text_of_a_megabyte_with_halves_of_characters_arrives(form: str) -> None:
    long = "x" * (1 << 20) + "\x00\ud800"
    found = call([1], [2], [{"role": "user", "content": long}], {"role": "assistant", "content": long})
    made = export(form, [recording_of([call_span("0" * 15 + "1", found, parent="", at_ns=START_NS)])])

    assert made.data.count(b"x" * (1 << 20)) >= 2
    assert 1 == sum(count for what, count in made.lost.items() if what.startswith("rollouts with halves"))


def test_other_agents_are_left_out_and_counted() -> None:
    for form in ("atif", "verl", "langfuse", "otlp"):
        made = export(form, [team()], agents="^writer$")
        assert 2 == made.lost["model calls of agents that --agents does not choose: left out"]
        assert b"It is 4." not in made.data


def test_table_holds_what_the_lines_hold() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(export("verl", [team()], suffix=".parquet").data)).to_pylist()
    lines = lines_of("verl", team())

    assert [None, None] == [row.pop("multi_modal_data") for row in table]
    assert lines == [{**row, "extra_fields": json.loads(row["extra_fields"])} for row in table]
    assert [[3, 4, 5, 6], [8]] == [line["response_ids"] for line in lines]
    assert [[1, 1, 0, 1], [1]] == [line["response_mask"] for line in lines]


def test_batches_of_langfuse_stay_below_its_limit() -> None:
    long = "x" * (1 << 20)
    spans = [
        call_span(f"{n:016x}", call([n], [2], [{"role": "user", "content": long}], {}), parent="", at_ns=START_NS + n)
        for n in range(1, 6)
    ]
    lines = export("langfuse", [recording_of(spans)]).data.splitlines()
    assert 3 == len(lines)
    assert max(map(len, lines)) < 3.5e6
