"""Importing OTLP in Protobuf, encoded by OpenTelemetry's exporter, with each framing of messages in a file."""

import gzip
import json
from pathlib import Path

import pytest
from backports import zstd
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl.errors import AglError, DatasetError
from agl_data.importing.wire import read_batches

from .conftest import Imports
from .logs import chat, write_lines


@pytest.fixture
def messages() -> list[bytes]:
    """Return messages with two traces of two spans each, one span per message."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    for number in range(2):
        asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": f"{number}? {'a' * 300}"}]}])
        about = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "qwen",
            "gen_ai.request.temperature": 0.25,
            "gen_ai.request.top_k": -1,
            "gen_ai.request.stop_sequences": ("a", "b"),
            "is_test": True,
            "gen_ai.input.messages": asked,
            "gen_ai.output.messages": asked.replace("user", "assistant"),
        }
        with tracer.start_as_current_span("top") as top:
            top.add_event("gen_ai.evaluation.result", {"gen_ai.evaluation.score.value": 0.5})
            with tracer.start_as_current_span("chat", attributes=about):
                pass
    return [encode_spans([span]).SerializeToString() for span in exporter.get_finished_spans()]


def varint(number: int) -> bytes:
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + varint(number >> 7)


FRAMES = {
    "one body after the other": lambda data: data,
    "with a varint": lambda data: varint(len(data)) + data,
    "with four bytes": lambda data: len(data).to_bytes(4, "big") + data,
    "each compressed": lambda data: (packed := zstd.compress(data)) and len(packed).to_bytes(4, "big") + packed,
}
PACKED = {"plain": lambda data: data, "gzip": gzip.compress, "zstd": zstd.compress}


@pytest.mark.parametrize("frame", FRAMES)
def test_batches_are_those_of_the_exporters_own_json(frame: str, messages: list[bytes], tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    path = tmp_path / "spans.pb"
    path.write_bytes(b"".join(map(FRAMES[frame], messages)))
    read = read_batches(path)
    assert read is not None
    found = [span for line in read for span in line.value["resourceSpans"][0]["scopeSpans"][0]["spans"]]

    known = [MessageToDict(ExportTraceServiceRequest.FromString(data)) for data in messages]
    expected = [batch["resourceSpans"][0]["scopeSpans"][0]["spans"][0] for batch in known]
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs["startTimeUnixNano"] == str(ours["startTimeUnixNano"])
        assert [pair["key"] for pair in theirs.get("attributes", [])] == [
            pair["key"] for pair in ours.get("attributes", [])
        ]
        for given, kept in zip(theirs.get("attributes", []), ours.get("attributes", []), strict=True):
            (name, value), *_ = given["value"].items()
            assert value == kept["value"][name]


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("frame", FRAMES)
def test_spans_become_rollouts(
    frame: str, packed: str, messages: list[bytes], tmp_path: Path, imports: Imports
) -> None:
    path = tmp_path / "spans.pb"
    path.write_bytes(PACKED[packed](b"".join(map(FRAMES[frame], messages))))
    done = imports(path)

    assert ({"otlp": 1}, 2, 2, 2) == (done.files, done.rollouts, done.calls, done.rewards)
    call = next(span.call for span in imports.recordings()[0].spans if span.call)
    assert (0.25, -1, ("a", "b")) == (call.sampling.temperature, call.sampling.top_k, call.sampling.stop)
    again = imports(path)
    assert (0, 2, 0) == (again.rollouts, again.known, again.rewards)


def test_requests_in_json_that_the_collector_compressed_one_by_one_are_read(
    messages: list[bytes], tmp_path: Path, imports: Imports
) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    batches = [MessageToDict(ExportTraceServiceRequest.FromString(data)) for data in messages]
    packed = [zstd.compress(json.dumps(batch).encode()) for batch in batches]
    path = tmp_path / "spans.json"
    path.write_bytes(b"".join(len(data).to_bytes(4, "big") + data for data in packed))

    assert (2, 2) == (imports(path).rollouts, imports(path).known)


@pytest.mark.parametrize("frame", FRAMES)
def test_file_that_is_cut_anywhere_is_refused(frame: str, messages: list[bytes], tmp_path: Path) -> None:
    from agl_data.importing.readers import otlp

    data = b"".join(map(FRAMES[frame], messages))
    ends = {sum(len(FRAMES[frame](each)) for each in messages[: count + 1]) for count in range(len(messages))}
    path = tmp_path / "spans.pb"
    for size in range(20, len(data), 23):
        path.write_bytes(data[:size])
        if size not in ends:
            with pytest.raises(AglError) as refused:
                list(otlp.read(path))
            assert "\n" not in str(refused.value)


def test_logs_are_no_spans(tmp_path: Path, imports: Imports) -> None:
    log = bytes([0x09, *range(8), 0x1A, 2, 65, 66])
    scope = bytes([0x12, len(log)]) + log
    group = bytes([0x12, len(scope)]) + scope
    path = tmp_path / "logs.pb"
    path.write_bytes(bytes([0x0A, len(group)]) + group)

    with pytest.raises(DatasetError, match=r"message 1 is not a batch of spans .*or hold logs or metrics"):
        imports(path)
    assert [] == imports.recordings()


def test_message_that_nests_without_end_is_refused(tmp_path: Path, imports: Imports) -> None:
    data = b""
    for _ in range(400):
        data = b"\x0a" + varint(len(data)) + data
        data = b"\x2a" + varint(len(data)) + data
    pair = b"\x12" + varint(len(data)) + data
    for tag in (0x4A, 0x12, 0x12, 0x0A):
        pair = bytes([tag]) + varint(len(pair)) + pair
    path = tmp_path / "deep.pb"
    path.write_bytes(pair)

    with pytest.raises(DatasetError, match="nested too deeply"):
        imports(path)


@pytest.mark.parametrize("start", ["{\n", "{\n  ", "[\n", "\n{\n  ", "\n\n[\n", "\n\n\n\n{"])
def test_json_that_spans_lines_is_not_taken_for_protobuf(start: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{start}"messages": []' + "}" * 200)

    assert read_batches(path) is None


def test_lines_that_zstd_compressed_are_read_and_a_cut_file_refused(tmp_path: Path, imports: Imports) -> None:
    lines = write_lines(tmp_path / "a.jsonl", (chat(str(number), "b" * number) for number in range(100))).read_bytes()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstd.compress(lines[:5000]) + zstd.compress(lines[5000:]))
    assert 100 == imports(path).rollouts

    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DatasetError, match="is cut or damaged"):
        imports(path)


def test_bomb_of_zstd_is_refused(tmp_path: Path, imports: Imports) -> None:
    path = tmp_path / "a.jsonl.zst"
    blank = b" " * (1 << 20) + b"\n"
    path.write_bytes(zstd.compress(blank * 80))

    with pytest.raises(DatasetError, match=r"grows to more than 200 times its size"):
        imports(path)
    assert [] == imports.recordings()


def test_missing_library_of_zstd_is_named(tmp_path: Path, imports: Imports, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstd.compress(json.dumps(chat("a", "b")).encode()))
    monkeypatch.setitem(__import__("sys").modules, "backports.zstd", None)

    with pytest.raises(DatasetError, match=r"pip install 'agl-data\[zstd\]', or unpack the file"):
        imports(path)
