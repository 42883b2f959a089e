"""The sink that writes a run to MLflow: to a tracking server, a database, or a SQLite file in the work directory."""

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from agl.contracts import SinkOutcome, SinkRow, SinkRun, SinkTable, flat_config, shortened
from agl.errors import ExportError
from agl.urls import shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

MOST = 1000
"""Largest number of metric values that MLflow accepts in one request."""

MOST_PARAMS = 100
"""Largest number of parameters that MLflow accepts in one request."""

LONGEST_PARAM = 6000
LONGEST_TAG = 5000

ID = "agl.id"
"""The MLflow tag that holds the run's id, by which a resumed run is found."""

STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowSink:
    """Writes a run through ``MlflowClient``; a metric's step in MLflow is the step of its algorithm.

    Args:
        tracking_uri: URI of the server or store; by default ``$MLFLOW_TRACKING_URI``, or else ``mlflow.db`` in the
            experiment's work directory.
        experiment: Name of the experiment in MLflow; by default ``$MLFLOW_EXPERIMENT_NAME``, or else the experiment's
            own name.
        tags: Tags of the run.
    """

    def __init__(self, *, tracking_uri: str = "", experiment: str = "", tags: dict[str, str] | None = None) -> None:
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
        self._tags = tags or {}
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._names: frozenset[str] = frozenset()
        self._known: dict[str, set[int]] = {}
        self._tables: set[str] = set()
        self._end = (0, 0)

    @property
    def destination(self) -> str:
        """The tracking URI without a password, and the run's id once it exists."""
        return f"{shown_url(self._uri) or 'MLflow'}{f' as run {self._run_id}' if self._run_id else ''}"

    def begin(self, run: SinkRun) -> None:
        """Create the run, or find the run that an earlier process created, and write its configuration."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # otherwise MLflow reports its use
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # MLflow logs every new database
        artifacts = None
        if not self._uri:
            folder = Path(run.folder).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            self._uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow-artifacts").as_uri()
        client = self._client = MlflowClient(self._uri)
        name = self._experiment or run.experiment
        found = client.get_experiment_by_name(name)
        experiment_id = found.experiment_id if found else client.create_experiment(name, artifact_location=artifacts)
        kept = self._find_or_make(client, experiment_id, run)
        self._run_id = kept.info.run_id
        self._names = frozenset(kept.data.metrics)
        self._known.clear()
        texts = {key: shortened(text, LONGEST_PARAM) for key, text in flat_config(run.config).items()}
        new = [Param(key, text) for key, text in texts.items() if key not in kept.data.params]
        for start in range(0, len(new), MOST_PARAMS):
            client.log_batch(self._run_id, params=new[start : start + MOST_PARAMS])
        client.log_text(self._run_id, json.dumps(run.config, indent=2, ensure_ascii=False), "config.json")

    def log(self, rows: list[SinkRow]) -> None:
        """Write the metric values that the MLflow run does not have yet."""
        client = self._begun()
        new: list[Metric] = []
        for row in rows:
            self._end = max(self._end, (row.experiment_step, _milliseconds(row)))
            new += [metric for metric in _metrics(row) if metric.step not in self._steps_of(metric.key)]
        for start in range(0, len(new), MOST):
            part = new[start : start + MOST]
            client.log_batch(self._run_id, metrics=part)
            for metric in part:
                self._known[metric.key].add(metric.step)

    def show(self, tables: list[SinkTable]) -> None:
        """Write each table as a JSON artifact in the form that MLflow displays as a table."""
        client = self._begun()
        for table in tables:
            data = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
            client.log_text(self._run_id, json.dumps(data, ensure_ascii=False), f"{table.name}.json")
            self._tables.add(f"{table.name}.json")
        listed = [{"path": path, "type": "table"} for path in sorted(self._tables)]
        client.set_tag(self._run_id, "mlflow.loggedArtifacts", json.dumps(listed))

    def end(self, end: SinkOutcome) -> None:
        """Write the summary's numbers as metrics and its texts as tags, and end the run."""
        from mlflow.entities import Metric, RunTag

        client = self._begun()
        step, time = self._end
        numbers = {name: float(value) for name, value in end.summary.items() if isinstance(value, int | float)}
        texts = {name: str(value) for name, value in end.summary.items() if name not in numbers}
        client.log_batch(
            self._run_id,
            metrics=[Metric(f"result/{name}", value, time, step) for name, value in numbers.items()],
            tags=[RunTag(f"agl.{name}", shortened(text, LONGEST_TAG)) for name, text in texts.items()],
        )
        client.set_terminated(self._run_id, STATUSES[end.status])

    def _find_or_make(self, client: "MlflowClient", experiment_id: str, run: SinkRun) -> "Run":
        found = client.search_runs([experiment_id], f"tags.`{ID}` = '{run.id}'", max_results=1)
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            return found[0]
        own = {ID: run.id, "agl.experiment": run.experiment, "agl.run": str(run.run), "agl.agent": run.agent}
        tags = {key: shortened(text, LONGEST_TAG) for key, text in {**self._tags, **own}.items()}
        return client.create_run(experiment_id, run_name=run.name, tags=tags)

    def _steps_of(self, name: str) -> set[int]:
        """Return the steps at which the run has a value of the metric."""
        if name not in self._known:
            history = self._begun().get_metric_history(self._run_id, name) if name in self._names else ()
            self._known[name] = {metric.step for metric in history}
        return self._known[name]

    def _begun(self) -> "MlflowClient":
        if self._client is None:
            raise ExportError("the run has not begun")
        return self._client


def _metrics(row: SinkRow) -> "Iterator[Metric]":
    from mlflow.entities import Metric

    for name, value in row.named().items():
        yield Metric(name, value, _milliseconds(row), row.step)


def _milliseconds(row: SinkRow) -> int:
    return round(1000 * row.time)
