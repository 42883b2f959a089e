"""Exports dialogues as a Parquet data set for TRL's trainers of vision models, one dialogue a row.

The column ``messages`` has placeholders ``{"type": "image"}``, and ``images`` the pictures in their order. The
types of the columns tell ``datasets`` how to decode both: messages are JSON, because their fields vary.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agl.errors import ConfigError
from agl.schemas import Blob, to_json
from agl_data.export.conversations import arguments_of, function_of, objects_in
from agl_data.export.dialogues import dialogues
from agl_data.export.pictures import url_of
from agl_data.export.tables import Table
from agl_data.json_values import storable
from agl_inspect.exports import Exported, ExportSetup

_TOOLS = "dialogues with tools, which TRL ignores in a data set with pictures: left out"
_LOST = (
    "dialogues with a picture from a tool or one that the store does not have, or with parts other than text and "
    "pictures: left out"
)
_FEATURES = {"images": {"feature": {"_type": "Image"}, "_type": "List"}}


class TrlWriter:
    """Writes dialogues with their pictures and rewards."""

    reads_blobs = True

    def __init__(self, *, setup: ExportSetup) -> None:
        if setup.path is None or setup.path.suffix != ".parquet":
            raise ConfigError(
                "--format trl writes Parquet, which holds pictures; name an --output that ends in .parquet"
            )
        self._losses, self._table = setup.losses, Table(setup.file, _schema)

    def write(self, item: Exported) -> int:
        """Write the dialogues of a rollout; returns their number."""
        lines = dialogues(item.episode, item.recording.spans)
        return sum(self._written(line, item) for line in lines)

    def _written(self, line: dict[str, Any], item: Exported) -> bool:
        if "tools" in line:
            self._losses.add(_TOOLS, line["rollout_id"])
            return False
        try:
            messages, blobs = _split(line["messages"], item.blobs)
        except LookupError:
            self._losses.add(_LOST, line["rollout_id"])
            return False
        text = to_json(storable(messages)).decode()
        images = [{"bytes": blob.data, "path": None} for blob in blobs]
        about = {name: line[name] for name in ("rollout_id", "agent", "reward")}
        size = len(text) + sum(len(blob.data) for blob in blobs)
        self._table.add({"messages": text, "images": images, **about}, size=size)
        return True

    def close(self) -> None:
        """Complete the file."""
        self._table.close()


def _split(messages: Sequence[dict[str, Any]], blobs: Mapping[str, Blob]) -> tuple[list[dict[str, Any]], list[Blob]]:
    """Return messages with placeholders, and their pictures in order; raises LookupError for what TRL cannot take."""
    pictures: list[Blob] = []

    def part_of(part: dict[str, Any], role: str) -> dict[str, str]:
        if isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        blob = blobs[url_of(part)]
        if role == "tool" or not blob.media_type.startswith("image/"):  # TRL counts no placeholders of tools
            raise LookupError
        pictures.append(blob)
        return {"type": "image"}

    # TRL would put the pictures before the first message of a user whose content is a text, so no content is one.
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else objects_in(content)
        found.append({**message, "content": [part_of(part, str(message.get("role"))) for part in parts]})
        if calls := [_call(call) for call in objects_in(message.get("tool_calls"))]:
            found[-1]["tool_calls"] = calls
    return found, pictures


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as chat templates take them."""
    return {**call, "function": {**function_of(call), "arguments": arguments_of(call)}}


def _schema(arrow: Any) -> Any:
    image = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    types = {"messages": arrow.json_(), "images": arrow.list_(image)}
    types |= {"rollout_id": arrow.string(), "agent": arrow.string(), "reward": arrow.float64()}
    metadata = {"huggingface": json.dumps({"info": {"features": _FEATURES}})}
    return arrow.schema(list(types.items()), metadata=metadata)
