"""The sink ``webhook`` sends each event once, whatever the other side answers."""

import asyncio
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import component
from agl.contracts import SinkOutcome, SinkRow, SinkRun, SinkTable, StepReport
from agl.errors import ConfigError, ExportError
from agl.schemas import PromptTemplate
from agl_run import Quiet
from agl_run.cli.run import sync_plan
from agl_run.deliver import sinking
from agl_run.deliver.sink_contents import shown_config
from agl_sinks import webhook
from agl_sinks.webhook import WebhookSink

pytestmark = pytest.mark.alone

PATH = "/services/T0/B0/the-secret-part"
COLUMNS = ("kind", "rule", "algorithm", "step", "time", "evidence", "change")


class Receiver:
    """A web server that stores accepted requests; it answers with the statuses in ``answers``, and then with 200."""

    def __init__(self) -> None:
        receiver = self
        self.answers: list[int] = []
        self.got: list[tuple[Mapping[str, str], bytes]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver.answers.pop(0) if receiver.answers else 200
                if status == 200:
                    receiver.got.append((dict(self.headers), body))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}{PATH}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self.events]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(webhook, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(sinking, "PAUSE_S", 0.01)
    receiver = Receiver()
    yield receiver
    receiver.close()


def begun(receiver: Receiver, folder: Path, **params: Any) -> WebhookSink:
    sink = WebhookSink(url=receiver.url, **params)
    sink.begin(SinkRun(id="small-1-ab", name="small-1", experiment="small", run=1, folder=str(folder / "work")))
    return sink


def alerts(*rows: tuple[Any, ...]) -> list[SinkTable]:
    return [SinkTable(name="alerts", columns=COLUMNS, rows=rows)]


FOUND = ("suggestion", "silent-groups", "grpo", 3, 1e9, "95% of the rollouts <!channel> & so on", "easier tasks")
FALLEN = ("collapse", "collapse", "validate", 8, 1e9, "the validation reward has fallen", "")


def test_finding_is_sent_as_text_and_as_fields_with_a_signature(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "s3cret")

    begun(receiver, tmp_path, secret_env="HOOK_SECRET").show(alerts(FOUND))

    ((headers, body),) = receiver.got
    event = json.loads(body)
    assert (
        "small-1: grpo step 3: 95% of the rollouts &lt;!channel&gt; &amp; so on. To change that: easier tasks"
    ) == event.pop("text")
    assert {
        "event": "suggestion",
        "id": "small-1-ab/suggestion/silent-groups/grpo/3",
        "experiment": "small",
        "run": 1,
        "agent": "",
        "rule": "silent-groups",
        "algorithm": "grpo",
        "step": 3,
        "time": 1e9,
        "evidence": "95% of the rollouts <!channel> & so on",
        "change": "easier tasks",
    } == event
    assert f"sha256={hmac.new(b's3cret', body, hashlib.sha256).hexdigest()}" == headers["X-Agl-Signature"]
    assert ("suggestion", "application/json") == (headers["X-Agl-Event"], headers["Content-Type"])


def test_events_that_were_sent_are_not_sent_again_by_another_process(receiver: Receiver, tmp_path: Path) -> None:
    begun(receiver, tmp_path).show(alerts(FOUND))
    end = SinkOutcome(status="failed", error="no rollouts", time=7.0)
    for _ in range(2):
        sink = begun(receiver, tmp_path)
        sink.log([SinkRow(algorithm="grpo", step=9, experiment_step=9, time=0.0, metrics={})])
        sink.show(alerts(FOUND, FALLEN))
        sink.end(end)
    begun(receiver, tmp_path).end(SinkOutcome(status="failed", error="no rollouts", time=8.0))

    assert ["suggestion", "collapse", "failure", "failure"] == receiver.kinds
    assert "small-1: failed after step 9: no rollouts" == receiver.events[2]["text"]
    assert 4 == len({event["id"] for event in receiver.events})


def test_passing_errors_are_repeated_and_a_refused_event_holds_up_no_other(receiver: Receiver, tmp_path: Path) -> None:
    receiver.answers = [503, 429, 200, 400, 200]
    sink = begun(receiver, tmp_path)
    sink.show(alerts(FOUND))
    with pytest.raises(ExportError, match=r"^http://127\.0\.0\.1:[0-9]+ answered 400 Bad Request$"):
        sink.show(alerts(FOUND, FALLEN, (*FALLEN[:3], 9, *FALLEN[4:])))
    assert [3, 9] == [event["step"] for event in receiver.events]
    sink.show(alerts(FOUND, FALLEN, (*FALLEN[:3], 9, *FALLEN[4:])))
    assert [3, 9, 8] == [event["step"] for event in receiver.events]


@pytest.mark.parametrize(
    ("status", "words"), [(302, "name that address"), (404, "answered 404"), (503, "answered 503")]
)
def test_an_address_that_refuses_is_named_without_its_path(
    receiver: Receiver, tmp_path: Path, status: int, words: str
) -> None:
    receiver.answers = [status] * 3
    with pytest.raises(ExportError, match=words) as raised:
        begun(receiver, tmp_path).show(alerts(FOUND))
    assert "secret" not in str(raised.value)


def test_an_address_where_nobody_answers_is_named_without_its_path(receiver: Receiver, tmp_path: Path) -> None:
    sink = begun(receiver, tmp_path)
    receiver.close()
    with pytest.raises(ExportError, match="does not answer") as raised:
        sink.show(alerts(FOUND))
    assert "secret" not in str(raised.value)
    assert "secret" not in sink.destination


def test_only_the_events_that_are_asked_for_are_sent(receiver: Receiver, tmp_path: Path) -> None:
    sink = begun(receiver, tmp_path, events=["collapse"])
    sink.show(alerts(FOUND, FALLEN))
    assert "1 event" == sink.end(SinkOutcome(status="finished"))
    begun(receiver, tmp_path).end(SinkOutcome(status="stopped"))
    assert ["collapse"] == receiver.kinds


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "needs the address"),
        ({"url": "http://h/p", "url_env": "HOOK"}, "only one of the two"),
        ({"url": "file:///etc/passwd"}, "is not a web address"),
        ({"url": "https:///the-secret"}, "is not a web address"),
        ({"url": "https://[h/the-secret"}, "is not a web address"),
        ({"url": "https://h:port/the-secret"}, "is not a web address"),
        ({"url": "https://h:99999/the-secret"}, "is not a web address"),
        ({"url": "https://h/the-secret\nHost: x"}, "is not a web address"),
        ({"url": "https://user:the-secret@h/"}, "the address at h has a user or a password"),
        ({"url_env": "HOOK_NOT_SET"}, "HOOK_NOT_SET, which is not set"),
        ({"url": "http://h", "secret_env": "HOOK_NOT_SET"}, "secret_env names .* HOOK_NOT_SET"),
        ({"url": "http://h", "events": "collapse"}, "write a list"),
        ({"url": "http://h", "events": []}, "write a list"),
        ({"url": "http://h", "events": ["colapse"]}, "did you mean 'collapse'"),
        ({"url": "http://h", "timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_wrong_parameters_are_refused_without_the_address(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        WebhookSink(**params)
    assert "the-secret" not in str(raised.value)


class Learner:
    """An algorithm that reports silent groups in every step, and with ``fails`` raises in its last step."""

    def __init__(self, *, steps: int = 4, fails: bool = False) -> None:
        self._steps, self._fails, self._step = steps, fails, 0

    async def setup(self, context: Any) -> None:
        pass

    async def step(self) -> StepReport:
        self._step += 1
        if self._fails and self._step == self._steps:
            raise ValueError("out of tasks, with sk-abcdefghijklmnop")
        return StepReport(step=self._step, is_finished=self._step >= self._steps, metrics={"silent_share": 1.0})

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    async def restore(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]

    async def close(self) -> None:
        pass


class Plugin:
    @agl.hookimpl
    def agl_algorithms(self) -> Any:
        yield agl.AlgorithmEntry(name="learner", factory=Learner, tunes=("prompt_template",), needs_token_ids=False)


@pytest.fixture
def trainer(receiver: Receiver, tmp_path: Path) -> Callable[..., agl.Trainer]:
    def make(**params: Any) -> agl.Trainer:
        manager = agl.PluginManager.from_environment()
        manager.register(Plugin(), name="learner")
        return agl.Trainer(
            plugins=manager,
            progress=Quiet(),
            name="small",
            store=f"sqlite:///{tmp_path}/runs.db",
            workdir=str(tmp_path / "work"),
            gateway="none",
            initial_resources={"prompt": PromptTemplate(template="none")},
            algorithm=agl.algorithms.algorithm("learner", tunes="prompt", **params),
            exporters=component("webhook", url=receiver.url),
        )

    return make


def solve(task: dict[str, int]) -> float:
    return 1.0


TASKS = [{"n": 1}]


def test_run_tells_its_findings_and_its_failure_and_after_a_resume_only_what_is_new(
    receiver: Receiver, trainer: Callable[..., agl.Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [500, 500]
    with pytest.raises(ValueError, match="out of tasks"):
        trainer(fails=True).fit(solve, TASKS)
    assert ["suggestion", "failure"] == receiver.kinds
    assert "ValueError: out of tasks, with sk-***" == receiver.events[1]["error"]

    trainer(steps=9).fit(solve, TASKS, resume=True)
    assert ["suggestion", "failure", "finished"] == receiver.kinds
    assert "small-1: finished after step 9" == receiver.events[2]["text"]
    assert [] == [record for record in caplog.records if "webhook" in record.getMessage()]


def test_address_that_refuses_is_reported_once_without_its_path_and_gets_the_rest_afterwards(
    receiver: Receiver, trainer: Callable[..., agl.Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [404] * 1000
    trainer().fit(solve, TASKS)
    assert [] == receiver.got
    assert 1 == len([record for record in caplog.records if "the experiment goes on" in record.getMessage()])
    assert "`agl run --sync`" in caplog.text
    assert "the-secret-part" not in caplog.text

    receiver.answers.clear()
    said: list[str] = []
    asyncio.run(sync_plan(trainer().plan(solve, TASKS), run=None, say=said.append))
    assert ["suggestion", "finished"] == receiver.kinds
    assert [f"webhook: 2 events written to {receiver.url.removesuffix(PATH)}"] == said


def test_an_address_that_hangs_does_not_hold_up_the_steps(
    tmp_path: Path, trainer: Callable[..., agl.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(webhook, "post", lambda *args, **options: is_over.wait(60))
    monkeypatch.setattr(sinking.Sinks.__init__, "__kwdefaults__", {"end_s": 0.2})
    started = time.monotonic()
    result = trainer(steps=30).fit(solve, TASKS)
    is_over.set()
    assert {"learner": 30} == result.steps
    assert time.monotonic() - started < 30


def test_configuration_that_other_systems_see_lacks_the_address(trainer: Callable[..., agl.Trainer]) -> None:
    shown = json.dumps(shown_config(trainer().config))
    assert "http://127.0.0.1" in shown
    assert "the-secret-part" not in shown
