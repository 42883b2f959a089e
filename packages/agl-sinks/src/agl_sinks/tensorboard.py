"""The sink that writes TensorBoard's event files: a folder per run, a tag per metric, and everything else as text.

tensorboardX's ``SummaryWriter`` is not used, because it loses errors of its thread.
"""

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from agl.contracts import Cell, SinkOutcome, SinkRow, SinkRun, SinkTable
from agl.errors import ExportError

_event: Any = import_module("tensorboardX.proto.event_pb2")  # messages without type stubs
_summary: Any = import_module("tensorboardX.proto.summary_pb2")
_make: Any = import_module("tensorboardX.summary")
_writers: Any = import_module("tensorboardX.event_file_writer")


class TensorBoardSink:
    """Writes a run into ``LOG_DIR/RUN``. A process that resumes the run writes a new file, which replaces earlier ones.

    Args:
        log_dir: The folder for ``tensorboard --logdir``; by default ``tensorboard`` in the experiment's work directory.
    """

    def __init__(self, *, log_dir: str = "") -> None:
        self._log_dir = log_dir
        self._folder: Path | None = None
        self._writer: Any = None
        self._step = 0

    @property
    def destination(self) -> str:
        """The folder of the run; before the run begins, the folder of all runs."""
        return str(self._folder or self._log_dir or "tensorboard")

    def begin(self, run: SinkRun) -> None:
        """Create an event file, and write the configuration into it."""
        self._folder = Path(self._log_dir or Path(run.folder) / "tensorboard") / run.id
        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{time.time_ns()}"  # the library names files by the second, which two files may share
        self._writer = _writers.EventsWriter(str(self._folder / "events"), suffix)
        # The start of a session makes readers replace the data of earlier files by this file's.
        self._write(session_log=_event.SessionLog(status=_event.SessionLog.START))
        self._text("config", f"```json\n{json.dumps(run.config, indent=2, ensure_ascii=False)}\n```")

    def log(self, rows: list[SinkRow]) -> None:
        """Write every metric value at its algorithm's step."""
        for row in rows:
            for name, value in row.named().items():
                summary = _summary.Summary(value=[_summary.Summary.Value(tag=name, simple_value=value)])
                self._write(step=row.step, wall_time=row.time, summary=summary)
            self._step = max(self._step, row.experiment_step)
        self._begun().flush()

    def show(self, tables: list[SinkTable]) -> None:
        """Write each table as text, at the last step of all algorithms."""
        for table in tables:
            self._text(table.name, _markdown(table))

    def end(self, end: SinkOutcome) -> None:
        """Write the status and the summary as a table, and close the file."""
        rows = tuple((name, str(value)) for name, value in {"status": end.status, **end.summary}.items())
        self._text("result", _markdown(SinkTable(name="result", columns=("name", "value"), rows=rows)))
        self._begun().close()

    def _text(self, tag: str, text: str) -> None:
        self._write(step=self._step, summary=_make.text(tag, text))
        self._begun().flush()

    def _write(self, *, step: int = 0, wall_time: float | None = None, **content: Any) -> None:
        """Write an event; ``wall_time`` is in Unix seconds, by default the present time."""
        at = time.time() if wall_time is None else wall_time
        self._begun().write_event(_event.Event(step=step, wall_time=at, **content))

    def _begun(self) -> Any:
        if self._writer is None:
            raise ExportError("the run has not begun")
        return self._writer


def _markdown(table: SinkTable) -> str:
    lines = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
