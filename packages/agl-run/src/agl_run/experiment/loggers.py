"""Metric sinks of the core: JSON lines."""

import time
from collections.abc import Sequence
from pathlib import Path

from agl.contracts import Metric
from agl.schemas import to_json


class JsonLines:
    """Appends every number as one JSON object per line to ``metrics.jsonl`` in the experiment's work directory."""

    def __init__(self, *, experiment: str, workdir: Path, file: str = "metrics.jsonl") -> None:
        self._experiment = experiment
        workdir.mkdir(parents=True, exist_ok=True)
        self._file = open(workdir / file, "ab")  # noqa: SIM115  # closed by close()

    def log(self, metrics: Sequence[Metric]) -> None:
        """Append and flush."""
        for metric in metrics:
            line = {
                "time": metric.time or time.time(),
                "algorithm": metric.algorithm,
                "step": metric.step,
                "name": metric.name,
                "value": metric.value,
            }
            self._file.write(to_json(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
