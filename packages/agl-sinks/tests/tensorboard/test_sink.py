"""The TensorBoard sink's runs, read from the event files by TensorBoard's own reader."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

from agl.contracts import flat_config
from agl_testing.conformance import PluginConformance, SinkConformance, SinkRead

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class TestPlugin(PluginConformance):
    module = "agl_sinks.plugin"


class TestTensorBoard(SinkConformance):
    use = "tensorboard"
    search = "apo"

    def params(self, folder: Path) -> dict[str, Any]:
        return {"log_dir": str(folder / "logs")}

    def broken_params(self, folder: Path) -> dict[str, Any]:
        (folder / "file").touch()
        return {"log_dir": str(folder / "file")}

    def read(self, folder: Path) -> list[SinkRead]:
        return [read_run(path) for path in sorted((folder / "logs").glob("*"))]


def read_run(folder: Path) -> SinkRead:
    reader = EventAccumulator(str(folder), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE)
    reader.Reload()
    tags: Any = reader.Tags()
    texts = {tag.removesuffix("/text_summary"): text_of(reader, tag) for tag in tags["tensors"]}
    result = {str(row["name"]): str(row["value"]) for row in rows_of(texts.pop("result", ""))}
    config = texts.pop("config", "{}").removeprefix("```json").removesuffix("```")
    return SinkRead(
        name=folder.name.rpartition("-")[0],
        figures={tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags["scalars"]},
        config=flat_config(json.loads(config)),
        tables={name: rows_of(text) for name, text in texts.items()},
        result=result,
    )


def text_of(reader: EventAccumulator, tag: str) -> str:
    return str(reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode())


def rows_of(text: str) -> list[dict[str, Any]]:
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
