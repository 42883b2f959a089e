"""Event files of TensorBoard, by way of tensorboardX without its writer, which loses the errors of its own thread."""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

_event: Any = import_module("tensorboardX.proto.event_pb2")  # messages without type stubs
_summary: Any = import_module("tensorboardX.proto.summary_pb2")
_make: Any = import_module("tensorboardX.summary")
_writers: Any = import_module("tensorboardX.event_file_writer")


class EventFile:
    """A new event file in a folder; readers take it in place of those that were there before."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{time.time_ns()}"  # the library's name has the second only, and two files may share that
        self._writer = _writers.EventsWriter(str(folder / "events"), suffix)
        start = _event.SessionLog(status=_event.SessionLog.START)
        self._writer.write_event(_event.Event(step=0, wall_time=time.time(), session_log=start))

    def number(self, tag: str, value: float, *, step: int, at: float) -> None:
        """Write a number at a step; ``at`` is in Unix seconds."""
        summary = _summary.Summary(value=[_summary.Summary.Value(tag=tag, simple_value=value)])
        self._writer.write_event(_event.Event(step=step, wall_time=at, summary=summary))

    def text(self, tag: str, text: str, *, step: int) -> None:
        """Write a text in Markdown at a step."""
        self._writer.write_event(_event.Event(step=step, wall_time=time.time(), summary=_make.text(tag, text)))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._writer.close()
