"""Sending traces during an experiment: a slow, unreachable or refusing backend never changes the experiment."""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import component
from agl.errors import ConfigError
from agl_run import FitResult, Quiet
from agl_sinks.otlp.exporter import OtlpExporter
from agl_testing.waiting import wait_until

from .agents import QUESTIONS, plain
from .backends import Backend

TASKS = [{"colour": colour} for colour in QUESTIONS]
REWARD = 1 / 3


class Said(Quiet):
    """A progress display that stores the printed lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def run(
    folder: Path, endpoint: str, *, agent: Callable[..., Any] = plain, progress: Quiet | None = None, **options: Any
) -> FitResult:
    """Run the agent on every task; several runs in one folder use the same store."""
    trainer = agl.Trainer(
        name="small",
        store=f"sqlite:///{folder}/runs.db",
        folder=folder,
        exporters=component("otlp", endpoint=endpoint, **options),
        progress=progress or Quiet(),
    )
    return trainer.fit(agent, val_dataset=TASKS, fresh=True)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def ids(run: int) -> list[str]:
    return [f"small-{run}-validate-val-00000-{number:05d}-000" for number in range(len(TASKS))]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in own if message.startswith("otlp")]


def test_every_rollout_is_sent_once_and_the_run_says_so(tmp_path: Path, backend: Backend) -> None:
    said = Said()

    result = run(tmp_path, backend.url, progress=said)

    assert REWARD == result.after
    assert ids(1) == sorted(backend.rollouts)
    assert [f"otlp: 3 rollouts sent to {backend.url}/v1/traces"] == [line for line in said.lines if "otlp" in line]


def test_rollouts_are_sent_while_the_experiment_still_runs(tmp_path: Path, backend: Backend) -> None:
    arrived: list[int] = []

    def solve(task: dict[str, Any]) -> float:
        if task["colour"] == "blue":
            wait_until(lambda: len(backend.rollouts) == 2)
            arrived.append(len(backend.rollouts))
        return 1.0

    run(tmp_path, backend.url, agent=solve)

    assert [2] == arrived


def test_a_second_run_sends_only_its_own_rollouts(tmp_path: Path, backend: Backend) -> None:
    run(tmp_path, backend.url)
    run(tmp_path, backend.url)

    assert [*ids(1), *ids(2)] == sorted(backend.rollouts)


@pytest.mark.long
def test_what_a_backend_missed_is_sent_by_the_next_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    result = run(tmp_path, f"http://127.0.0.1:{port}")

    assert REWARD == result.after
    away, left = warnings_of(caplog)
    assert f"http://127.0.0.1:{port}/v1/traces does not answer (ConnectError" in away
    assert "the experiment goes on, and the rollouts are sent when it answers" in away
    assert "3 rollouts not sent" in left

    with Backend(port) as backend:
        thread = threading.Thread(target=backend.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        run(tmp_path, backend.url)
        backend.shutdown()
        thread.join()
        assert [*ids(1), *ids(2)] == sorted(backend.rollouts)


def test_passing_errors_are_reported_once_and_the_rollouts_sent_again(
    tmp_path: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.faults.extend([(503, {"Retry-After": "0"}), (429, {})])

    run(tmp_path, backend.url)

    assert ids(1) == sorted(backend.rollouts)
    (told,) = warnings_of(caplog)
    assert f"{backend.url}/v1/traces answered 503 Service Unavailable: no" in told


def test_a_refusal_that_breaks_off_is_a_passing_error_all_the_same(
    tmp_path: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.faults.append((503, {"Transfer-Encoding": "chunked"}))

    run(tmp_path, backend.url)

    assert ids(1) == sorted(backend.rollouts)
    (told,) = warnings_of(caplog)
    assert f"{backend.url}/v1/traces answered 503 Service Unavailable" in told


def test_a_refused_key_is_reported_once_counted_and_never_fails_the_run(
    tmp_path: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.faults.extend([(401, {})] * 10)

    result = run(tmp_path, backend.url)

    assert REWARD == result.after
    assert [] == backend.rollouts
    told, counted = warnings_of(caplog)
    assert "answered 401 Unauthorized: no; give its key in the variable that headers_env names" in told
    assert f"otlp: 3 rollouts refused by {backend.url}/v1/traces" == counted


def test_a_redirect_is_named_and_not_taken_for_success(
    tmp_path: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.faults.extend([(302, {"Location": "https://elsewhere.example/login"})] * 10)

    run(tmp_path, backend.url)

    assert "it sends elsewhere; name that address: https://elsewhere.example/login" in warnings_of(caplog)[0]


def test_spans_that_a_backend_rejects_are_reported_with_its_reason(
    tmp_path: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.rejects = 2

    run(tmp_path, backend.url)

    assert "rejected 2 of " in warnings_of(caplog)[0]
    assert "spans: too old" in warnings_of(caplog)[0]


@pytest.mark.long
def test_a_backend_that_hangs_holds_the_end_up_for_a_limited_time(
    tmp_path: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.is_open.clear()
    started = time.monotonic()

    result = run(tmp_path, backend.url, timeout_s=60.0)

    assert REWARD == result.after
    assert time.monotonic() - started < 25
    assert "rollouts not sent" in warnings_of(caplog)[-1]


def test_headers_come_from_the_named_variable(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKEND_KEY", "Authorization=Bearer%20some-key, x-project=a=b")

    run(tmp_path, backend.url, headers_env="BACKEND_KEY")

    path, headers = backend.seen[0]
    assert "/v1/traces" == path
    assert ("Bearer some-key", "a=b") == (headers["authorization"], headers["x-project"])


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://localhost:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}, "http://collector:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/x"}, "http://collector:4318/x"),
    ],
)
def test_the_endpoint_is_that_of_the_standard_variables(
    given: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    assert url == OtlpExporter().destination


@pytest.mark.parametrize(
    ("params", "variable", "says"),
    [
        ({"endpoint": "localhost:4318"}, "", "the endpoint 'localhost:4318' is not the URL of a tracing backend"),
        ({"endpoint": "http://[::1"}, "", "the endpoint 'http://[::1' is not the URL of a tracing backend"),
        ({"endpoint": "http://host:otlp"}, "", "the endpoint 'http://host:otlp' is not the URL of a tracing backend"),
        ({"endpoint": "http://host/a b"}, "", "the endpoint 'http://host/a b' is not the URL of a tracing backend"),
        ({"endpoint": "http://me:pw@host"}, "", "the endpoint 'http://host' has a user or a password in it"),
        ({"endpoint": "http://:pw@host"}, "", "the endpoint 'http://host' has a user or a password in it"),
        ({"headers_env": "BACKEND_KEY"}, "", "the environment variable BACKEND_KEY, which is not set"),
        ({"headers_env": "BACKEND_KEY"}, "just-a-key", "BACKEND_KEY is not of the form name=value"),
        ({"headers_env": "BACKEND_KEY"}, "key=%E2%82%AC", "BACKEND_KEY is not of the form name=value"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_first_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], variable: str, says: str
) -> None:
    monkeypatch.setenv("BACKEND_KEY", variable)

    with pytest.raises(ConfigError, match=re.escape(says)):
        run(tmp_path, **{"endpoint": "http://localhost:4318", **params})


def test_two_exporters_of_one_name_are_refused(tmp_path: Path) -> None:
    trainer = agl.Trainer(exporters=["otlp", "otlp"], store="memory://", folder=tmp_path, progress=Quiet())

    with pytest.raises(ConfigError, match="'otlp' stands 2 times, and each exporter may stand once"):
        trainer.fit(plain, val_dataset=TASKS)
