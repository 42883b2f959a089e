"""The MLflow sink's runs, read by MLflow's own client from a SQLite store."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from agl.contracts import SinkOutcome, SinkRow, SinkRun
from agl_sinks.mlflow import MlflowSink
from agl_testing.conformance import PluginConformance, SinkConformance, SinkRead

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of SQLAlchemy, for MLflow's own queries
]


class TestPlugin(PluginConformance):
    module = "agl_sinks.plugin"


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without runs, created once because MLflow takes seconds to create one."""
    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


class TestMlflow(SinkConformance):
    use = "mlflow"
    search = "gepa"
    statuses = {"finished": "FINISHED", "failed": "FAILED"}

    @pytest.fixture(autouse=True)
    def store(self, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copy(empty_store, tmp_path / "mlflow.db")
        monkeypatch.chdir(tmp_path)  # where MLflow puts the artifacts of a SQLite store

    def params(self, folder: Path) -> dict[str, Any]:
        return {"tracking_uri": f"sqlite:///{folder / 'mlflow.db'}"}

    def broken_params(self, folder: Path) -> dict[str, Any]:
        return {"tracking_uri": f"sqlite:///{folder / 'mlflow.db' / 'mlflow.db'}"}

    def read(self, folder: Path) -> list[SinkRead]:
        client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("small")
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        return [read_run(client, run) for run in runs]


def test_number_that_a_step_gets_after_the_run_was_resumed_arrives_once(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validated(step: int, **metrics: float) -> SinkRow:
        return SinkRow(algorithm="validate", step=step, experiment_step=step, time=float(step), metrics=metrics)

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    run = SinkRun(id="small-1-0", name="small-1", experiment="small", run=1, folder=str(tmp_path))
    for later in ({"final_reward": 0.5}, {"final_reward": 0.5, "spread": 0.25}):
        sink = MlflowSink(tracking_uri=uri)
        sink.begin(run)
        sink.log([validated(5, reward=1.0), validated(9, reward=0.75)])
        sink.log([validated(5, **later)])
    sink.end(SinkOutcome(status="finished", summary={"reward_after": 1.0}))

    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    figures = read_run(client, found).figures
    assert [(5, 5.0), (9, 9.0)] == figures["validate/step"] == figures["validate/experiment_step"]
    assert [(5, 1.0), (9, 0.75)] == figures["validate/reward"]
    assert [(5, 0.5)] == figures["validate/final_reward"]
    assert [(5, 0.25)] == figures["validate/spread"]
    assert [(9, 1.0)] == figures["result/reward_after"]


def read_run(client: MlflowClient, run: Run) -> SinkRead:
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    figures = {key: [(metric.step, metric.value) for metric in history] for key, history in histories.items()}
    listed = json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]"))
    numbers = {key.removeprefix("result/"): str(values[-1][1]) for key, values in figures.items() if "result/" in key}
    texts = {key.removeprefix("agl."): text for key, text in run.data.tags.items() if key.startswith("agl.version/")}
    return SinkRead(
        name=str(run.info.run_name),
        figures=figures,
        config=dict(run.data.params),
        tables={item["path"].removesuffix(".json"): rows_of(run, item["path"]) for item in listed},
        result={"status": run.info.status, **numbers, **texts},
    )


def rows_of(run: Run, path: str) -> list[dict[str, Any]]:
    file = Path(str(run.info.artifact_uri).removeprefix("file://")) / path
    table = json.loads(file.read_text(encoding="utf-8"))
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
