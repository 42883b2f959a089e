"""``agl data otlp`` sends recorded rollouts to a backend, or writes them to a file."""

import json
from pathlib import Path

import pytest

import agl
from agl_run import Quiet
from agl_testing.commands import invoke_agl

from .agents import QUESTIONS, plain
from .backends import Backend


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    store = f"sqlite:///{tmp_path}/runs/agl.db"
    agl.Trainer(name="small", store=store, folder=tmp_path, progress=Quiet()).fit(
        plain, val_dataset=[{"colour": colour} for colour in QUESTIONS]
    )
    return tmp_path


def test_recorded_rollouts_are_sent_and_again_with_the_same_ids(recorded: Path, backend: Backend) -> None:
    said = invoke_agl("data", "otlp", "--endpoint", backend.url, folder=recorded)
    first = {(span.trace_id, span.span_id, span.name) for span in backend.spans}
    invoke_agl("data", "otlp", "small-1-validate-val-00000-00001-000", "--endpoint", backend.url, folder=recorded)

    assert f"3 rollouts sent to {backend.url}/v1/traces\n" == said
    assert 3 == len({trace for trace, _, _ in first})
    assert first == {(span.trace_id, span.span_id, span.name) for span in backend.spans}
    assert 4 == len(backend.rollouts)


def test_a_file_holds_otlp_json_with_hexadecimal_ids(recorded: Path, backend: Backend) -> None:
    invoke_agl("data", "otlp", "--output", "traces.jsonl", folder=recorded)
    invoke_agl("data", "otlp", "--endpoint", backend.url, folder=recorded)

    lines = [json.loads(line) for line in (recorded / "traces.jsonl").read_text().splitlines()]
    written = [
        (span["traceId"], span["spanId"], span.get("parentSpanId", ""), span["name"])
        for line in lines
        for group in line["resourceSpans"]
        for scope in group["scopeSpans"]
        for span in scope["spans"]
    ]
    assert written == [(span.trace_id, span.span_id, span.parent_id, span.name) for span in backend.spans]


def test_a_backend_that_refuses_is_named_with_the_next_step(recorded: Path, backend: Backend) -> None:
    backend.faults.append((404, {}))

    with pytest.raises(AssertionError) as refused:
        invoke_agl("data", "otlp", "--endpoint", backend.url, folder=recorded)

    text = str(refused.value)
    assert f"{backend.url}/v1/traces answered 404 Not Found: no; check the path of the endpoint" in text
    assert "0 rollouts sent before; sending them again adds nothing" in text
    assert "Traceback" not in text


def test_a_file_needs_no_backend_and_takes_no_settings_of_one(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")

    said = invoke_agl("data", "otlp", "--output", "traces.jsonl", folder=recorded)

    assert "3 rollouts written to traces.jsonl\n" == said
    with pytest.raises(AssertionError, match="leave out --endpoint and --headers-env"):
        invoke_agl("data", "otlp", "--output", "traces.jsonl", "--endpoint", "http://127.0.0.1:4318", folder=recorded)
