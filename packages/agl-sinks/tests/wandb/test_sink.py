"""The W&B sink's runs, read from the library's offline files."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from agl.contracts import SinkRow, SinkRun
from agl.errors import ExportError
from agl_sinks.wandb import WandbSink
from agl_testing.conformance import PluginConformance, SinkConformance, SinkRead
from agl_testing.waiting import wait_until

from .offline import read_runs

pytestmark = pytest.mark.long


class TestPlugin(PluginConformance):
    module = "agl_sinks.plugin"


class TestWandb(SinkConformance):
    use = "wandb"
    search = "apo"

    @pytest.fixture(autouse=True)
    def own_service(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make child processes start their own service of the library, as separately started programs do."""
        monkeypatch.delenv("WANDB_SERVICE", raising=False)

    def params(self, folder: Path) -> dict[str, Any]:
        return {"mode": "offline", "dir": str(folder)}

    def broken_params(self, folder: Path) -> dict[str, Any]:
        (folder / "file").touch()
        return {"mode": "offline", "dir": str(folder / "file")}

    def read(self, folder: Path) -> list[SinkRead]:
        return read_runs(folder)


def test_without_a_key_online_is_refused_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    sink = WandbSink(mode="online")

    with pytest.raises(ExportError, match="there is no key of W&B, neither in WANDB_API_KEY nor from `wandb login`"):
        sink.begin(SinkRun(id="small-1-0", name="small-1", experiment="small", run=1, folder=str(tmp_path)))


SERVICE_DIES = """
import os, sys
from pathlib import Path
from agl.contracts._sink import SinkOutcome, SinkRow, SinkRun
from agl_sinks.wandb import WandbSink

run = SinkRun(id="small-1-0", name="small-1", experiment="small", run=1, folder=sys.argv[1])
row = SinkRow(algorithm="left", step=1, experiment_step=1, time=1.0, metrics={"score": 0.5})
sink = WandbSink(mode="offline")
sink.begin(run)
for children in Path("/proc/self/task").glob("*/children"):
    for child in map(int, children.read_text().split()):
        os.kill(child, 9)
        os.waitpid(child, 0)
try:
    sink.log([row])
    sink.log([row])
except ConnectionError:
    sink.begin(run)
    sink.log([row])
    sink.end(SinkOutcome(status="finished"))
"""


def test_sink_goes_on_after_the_service_of_the_library_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # the script's own service is to be killed
    subprocess.run([sys.executable, "-c", SERVICE_DIES, str(tmp_path)], check=True)
    (found,) = wait_until(lambda: [one for one in read_runs(tmp_path) if one.result])
    assert [(1, 0.5)] == found.figures["left/score"]
    assert "finished" == found.result["status"]


class Server:
    """A fake run on a server, which drops rows up to its last step, and gives its last values to whoever resumes it."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []

    def init(self, **_: Any) -> SimpleNamespace:
        summary = {key: value for row in self.history for key, value in row.items()}
        first = self.history[-1]["_step"] + 1 if self.history else 0
        return SimpleNamespace(
            starting_step=first,
            summary=summary,
            settings=SimpleNamespace(sync_dir="server"),
            define_metric=lambda name, **_: name,
            finish=lambda **_: None,
            log=self.log,
        )

    def log(self, row: dict[str, Any], *, step: int, commit: bool) -> None:
        if commit and (not self.history or step > self.history[-1]["_step"]):
            self.history.append({**row, "_step": step})

    def values(self, name: str) -> list[tuple[int, float]]:
        step = f"{name.partition('/')[0]}/step"
        return [(row[step], row[name]) for row in self.history if name in row]


def row(step: int, *, algorithm: str = "left", **metrics: float) -> SinkRow:
    return SinkRow(algorithm=algorithm, step=step, experiment_step=step, time=1.0, metrics=metrics)


def validated(step: int, **metrics: float) -> SinkRow:
    return row(step, algorithm="validate", **metrics)


def test_numbers_that_came_late_hide_no_step_from_a_run_that_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    monkeypatch.setattr(wandb, "init", server.init)
    run = SinkRun(id="small-1-0", name="small-1", experiment="small", run=1, folder=str(tmp_path))
    rows = [row(1, score=0.1), validated(1, reward=0.1), row(2, score=0.2), validated(2, reward=0.2)]
    first = WandbSink(mode="offline")
    first.begin(run)
    first.log(rows)
    first.log([validated(step, final_reward=step / 10) for step in (1, 2)])

    second = WandbSink(mode="offline")
    second.begin(run)
    second.log([*rows, row(3, score=0.3)])
    second.log([validated(2, last=1.0), row(4, score=0.4)])

    assert [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)] == server.values("left/score")
    assert [(1, 0.1), (2, 0.2)] == server.values("validate/reward")
    assert [(1, 0.1), (2, 0.2)] == server.values("validate/final_reward")
    assert [(2, 1.0)] == server.values("validate/last")
