"""Reads the file of an offline run with the message types of the library ``wandb``, as ``wandb sync`` does."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

from agl.contracts import flat_config
from agl_testing.conformance import SinkRead

_BLOCK = 32_768
_HEAD = 7


def read_runs(folder: Path) -> list[SinkRead]:
    """Return each run as read from its newest folder."""
    newest: dict[str, Path] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        newest[file.stem] = file
    found = [read_run(file) for file in newest.values()]
    return [run for run in found if run.name]


def read_run(file: Path) -> SinkRead:
    name, result, config = "", {}, {}
    figures: dict[str, list[tuple[int, float]]] = defaultdict(list)
    axes: dict[str, str] = {}
    tables: dict[str, list[dict[str, Any]]] = {}
    for record in records(file):
        if record.WhichOneof("record_type") == "run":
            name = record.run.display_name
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif record.WhichOneof("record_type") == "metric":
            axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif record.WhichOneof("record_type") == "exit":
            result["exit_code"] = str(record.exit.exit_code)
        elif record.WhichOneof("record_type") == "summary":
            shown = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.summary.update
            }
            files = {key: value["path"] for key, value in shown.items() if isinstance(value, dict) and "path" in value}
            tables |= {key: rows_of(file.parent / "files" / path) for key, path in files.items()}
            result |= {key: str(value) for key, value in shown.items() if key not in files}
        elif record.WhichOneof("record_type") == "history":
            row = values_of(record.history.item)
            for key, value in row.items():
                if f"{key.partition('/')[0]}/*" in axes:
                    step = row[axes[f"{key.partition('/')[0]}/*"]]
                    figures[key].append((int(step), float(value)))
    has_ended = "exit_code" in result  # the library writes the end of its file after finish() has returned
    return SinkRead(
        name=name,
        figures=figures,
        config=flat_config(config),
        tables=tables,
        result=result if has_ended else {},
    )


def values_of(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def rows_of(file: Path) -> list[dict[str, Any]]:
    table = json.loads(file.read_text(encoding="utf-8"))
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def records(file: Path) -> Iterator[Record]:
    """Yield the messages of a file in LevelDB's log format; stops where an unfinished file ends."""
    data, place, parts = file.read_bytes(), _HEAD, b""
    while place + _HEAD <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEAD:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        chunk = data[place + _HEAD : place + _HEAD + length]
        if len(chunk) < length or not kind:
            return
        parts = chunk if kind in (1, 2) else parts + chunk
        place += _HEAD + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            yield record
