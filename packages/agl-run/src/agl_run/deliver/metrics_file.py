"""Writes an experiment's metrics as JSON lines beside its checkpoints, as an observer of finished steps."""

import time
from pathlib import Path

from agl.contracts import StepReport
from agl.schemas import to_json

NAME = "metrics.jsonl"


def append_metrics(algorithm: str, report: StepReport, workdir: Path, *, run: int, experiment_step: int) -> None:
    """Append every number of a step to ``metrics.jsonl`` in the work directory, one JSON object per line."""
    place = {"time": time.time(), "run": run, "algorithm": algorithm, "step": report.step}
    place |= {"experiment_step": experiment_step}
    lines = [to_json({**place, "name": name, "value": value}) + b"\n" for name, value in report.metrics.items()]
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / NAME, "ab") as file:
        file.writelines(lines)
