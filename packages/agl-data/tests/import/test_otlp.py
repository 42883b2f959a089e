"""Importing OTLP as JSON: from OpenTelemetry's exporter, with Phoenix's attributes, and from ``agl data otlp``."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode, Tracer

from agl.dialects import call_messages
from agl.errors import DatasetError
from agl_testing.commands import invoke_agl

from .conftest import Imports
from .logs import chat, trajectory, write_lines

SECOND = 1_000_000_000


class Recorded:
    """Records spans with OpenTelemetry, and writes them as its exporter encodes them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer: Tracer = provider.get_tracer("test")

    def write(self, path: Path) -> Path:
        """Write one request for each span in reverse order, as a collector may do."""
        spans = self.exporter.get_finished_spans()
        return write_lines(path, (MessageToDict(encode_spans([span])) for span in spans))


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def record_genai(recorded: Recorded) -> None:
    """Record an agent that calls a model, a tool, and the model again within a span of a client."""
    tracer = recorded.tracer
    said = {"type": "text", "content": "Will it rain?"}
    call = {"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"city": "Oslo"}}
    answer = {"type": "tool_call_response", "id": "c1", "response": "yes"}
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "guide"}
    with tracer.start_as_current_span("invoke_agent guide", attributes=agent):
        for asked, answered in (
            ([message("user", said)], message("assistant", call)),
            (
                [message("user", said), message("assistant", call), message("tool", answer)],
                message("assistant", {"type": "text", "content": "It will."}),
            ),
        ):
            about = {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": "gpt-6",
                "gen_ai.request.temperature": 0.5,
                "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be short."}]),
                "gen_ai.input.messages": json.dumps(asked),
                "gen_ai.output.messages": json.dumps([{**answered, "finish_reason": "stop"}]),
                "gen_ai.usage.input_tokens": 20,
                "gen_ai.usage.output_tokens": 7,
            }
            with tracer.start_as_current_span("chat gpt-6", attributes=about):
                pass
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"}
        with tracer.start_as_current_span("execute_tool weather", attributes=tool) as span:
            span.add_event(
                "gen_ai.evaluation.result",
                {"gen_ai.evaluation.name": "helpful", "gen_ai.evaluation.score.value": 0.75},
            )


def test_trace_of_genai_spans_becomes_a_rollout(tmp_path: Path, imports: Imports, recorded: Recorded) -> None:
    record_genai(recorded)
    done = imports(recorded.write(tmp_path / "traces.jsonl"))
    (recording,) = imports.recordings()
    first, second = [span.call for span in recording.spans if span.call]

    assert ({"otlp": 1}, 1, 2, {"guide": 1}) == (done.files, done.rollouts, done.calls, done.agents)
    assert {"prompt": "Will it rain?"} == recording.rollout.task
    assert ["system", "user", "assistant"] == [each["role"] for each in call_messages(first)]
    assert '{"city":"Oslo"}' == call_messages(first)[-1]["tool_calls"][0]["function"]["arguments"]
    assert ["system", "user", "assistant", "tool", "assistant"] == [each["role"] for each in call_messages(second)]
    assert 0.5 == first.sampling.temperature
    (episode,) = imports.episodes()
    assert (["guide", "guide"], 0.75) == ([call.agent for call in episode.transitions], episode.reward)
    first_span = recorded.exporter.get_finished_spans()[-1]
    assert first_span.start_time is not None
    assert recording.rollout.created_at == pytest.approx(first_span.start_time / SECOND)


def test_every_answer_of_a_call_is_kept(tmp_path: Path, imports: Imports, recorded: Recorded) -> None:
    answers = [message("assistant", {"type": "text", "content": words}) for words in ("Yes", "No")]
    about = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": json.dumps(answers)}
    with recorded.tracer.start_as_current_span("chat", attributes=about):
        pass
    imports(recorded.write(tmp_path / "traces.jsonl"))
    (call,) = [span.call for span in imports.recordings()[0].spans if span.call]

    choices = [(choice["index"], choice["message"]["content"]) for choice in call.response["choices"]]
    assert [(0, "Yes"), (1, "No")] == choices


def test_span_that_an_exporter_sent_twice_is_one_call(tmp_path: Path, imports: Imports, recorded: Recorded) -> None:
    record_genai(recorded)
    path = recorded.write(tmp_path / "traces.jsonl")
    path.write_text(path.read_text() * 2)
    done = imports(path)

    assert (1, 2, 1) == (done.rollouts, done.calls, done.rewards)


def test_trace_with_openinference_attributes_becomes_a_rollout(
    tmp_path: Path, imports: Imports, recorded: Recorded
) -> None:
    tracer = recorded.tracer
    function = "llm.output_messages.0.message.tool_calls.0.tool_call.function"
    about = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "qwen",
        "llm.invocation_parameters": '{"temperature": 0.25}',
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.type": "text",
        "llm.input_messages.0.message.contents.0.message_content.text": "Will it rain?",
        "llm.output_messages.0.message.role": "assistant",
        f"{function}.name": "weather",
        f"{function}.arguments": "{}",
        "llm.tools.0.tool.json_schema": '{"type": "function", "function": {"name": "weather"}}',
        "llm.token_count.prompt": 11,
    }
    with tracer.start_as_current_span("Guide", attributes={"openinference.span.kind": "AGENT"}):
        framework = tracer.start_as_current_span("ChatModel", attributes=about)
        with framework, tracer.start_as_current_span("ChatCompletion", attributes=about):
            pass
        tool = {"openinference.span.kind": "TOOL", "tool.name": "weather", "output.value": "yes"}
        with tracer.start_as_current_span("weather", attributes=tool):
            pass
    done = imports(recorded.write(tmp_path / "traces.jsonl"))
    (recording,) = imports.recordings()
    (call,) = [span.call for span in recording.spans if span.call]

    assert (1, {"Guide": 1}) == (done.calls, done.agents)
    assert [{"role": "user", "content": "Will it rain?"}] == call.request["messages"]
    assert "weather" == call.request["tools"][0]["function"]["name"]
    assert {"name": "weather", "arguments": "{}"} == call_messages(call)[-1]["tool_calls"][0]["function"]
    assert (0.25, "qwen") == (call.sampling.temperature, call.model)
    assert "yes" == next(s.attributes["gen_ai.tool.call.result"] for s in recording.spans if s.name == "weather")


def test_failed_trace_becomes_a_failed_rollout_and_one_without_calls_is_counted(
    tmp_path: Path, imports: Imports, recorded: Recorded
) -> None:
    with recorded.tracer.start_as_current_span("GET /"):
        pass
    with recorded.tracer.start_as_current_span("run") as span:
        record_genai(recorded)
        span.set_status(Status(StatusCode.ERROR, "out of paper"))
    done = imports(recorded.write(tmp_path / "traces.jsonl"))

    (recording,) = imports.recordings()
    error = recording.attempts[0].error
    assert error is not None
    assert ("failed", "out of paper") == (recording.rollout.status, error.message)
    assert 1 == done.lost["traces without a model call: left out"]


def test_rollouts_that_agl_otlp_wrote_come_back_with_agents_rewards_and_messages(
    tmp_path: Path, imports: Imports
) -> None:
    source = [chat("2 + 2?", "4", agent="sums", reward=1.0), chat("Hello", "Hi", agent="guide", reward=0.5)]
    write_lines(tmp_path / "chats.jsonl", source)
    write_lines(tmp_path / "trajectories.jsonl", [trajectory()])
    url = f"sqlite:///{tmp_path}/there.db"
    invoke_agl("data", "import", "chats.jsonl", "--reward", "reward", "--store", url, folder=tmp_path)
    invoke_agl("data", "import", "trajectories.jsonl", "--reward", "extra.reward", "--store", url, folder=tmp_path)
    invoke_agl("data", "otlp", "--contents", "--output", "traces.jsonl", "--store", url, folder=tmp_path)
    done = imports(tmp_path / "traces.jsonl")

    agents = {"sums": 1, "guide": 1, "terminus-2": 1, "searcher": 1}
    assert (3, 5, 0, agents) == (done.rollouts, done.calls, done.calls_with_ids, done.agents)
    found = {
        (episode.transitions[0].agent, episode.reward, recording.rollout.task["prompt"])
        for recording, episode in zip(imports.recordings(), imports.episodes(), strict=True)
    }
    assert {("sums", 1.0, "2 + 2?"), ("guide", 0.5, "Hello"), ("terminus-2", 0.5, "Where?")} == found


def test_record_that_is_no_batch_of_spans_is_refused(tmp_path: Path, imports: Imports, recorded: Recorded) -> None:
    record_genai(recorded)
    path = recorded.write(tmp_path / "traces.jsonl")
    path.write_text(path.read_text() + '{"resourceLogs": []}\n')

    with pytest.raises(DatasetError, match=r"line 5 is not a batch of spans \(it has no resourceSpans\)"):
        imports(path)
    assert [] == imports.recordings()


def test_span_without_a_trace_is_refused(tmp_path: Path, imports: Imports) -> None:
    span = {"traceId": "0" * 32, "spanId": "x", "name": "chat"}
    request = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}

    with pytest.raises(DatasetError, match="line 1 has a span without a traceId of 32"):
        imports(write_lines(tmp_path / "traces.jsonl", [request]))
