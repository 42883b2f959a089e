"""Exported calls with pictures have the pictures, or the losses say that they do not."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RolloutQuery
from agl.schemas import Blob, unpack_ids
from agl.stores import MemoryStore
from agl_data.export.command import _LINES
from agl_data.export.preferences import recorded
from agl_data.importing.importer import find_files, import_files
from agl_data.importing.runs import Target
from agl_inspect.exports import Losses

from .conftest import episode_of
from .picture_world import PROCESSOR, answered, call_of, item_of, recording_of_calls, shown, two_turns, written

RECORDING, BLOBS = two_turns()


def url_of(blob: Blob) -> str:
    return f"data:image/png;base64,{base64.b64encode(blob.data).decode()}"


def lost(path: Path) -> list[str]:
    losses = Path(f"{path}.losses.json")
    return [each["what"] for each in json.loads(losses.read_bytes())["losses"]] if losses.exists() else []


def test_messages_have_the_pictures_as_data_urls() -> None:
    losses = Losses()
    (line,) = _LINES["messages"](asyncio.run(item_of(RECORDING, BLOBS)), losses)
    assert [url_of(blob) for blob in BLOBS] == [
        line["messages"][turn]["content"][0]["image_url"]["url"] for turn in (0, 2)
    ]
    assert [] == losses.listed()


def test_messages_keep_the_digest_of_a_picture_that_is_gone() -> None:
    losses = Losses()
    (line,) = _LINES["messages"](asyncio.run(item_of(RECORDING, BLOBS[:1])), losses)
    assert BLOBS[1].digest == line["messages"][2]["content"][0]["image_url"]["url"]
    assert [("pictures and other inputs", 1)] == [(what[:25], count) for what, count, _ in losses.listed()]


def test_rows_have_the_places_of_their_pictures() -> None:
    (line,) = _LINES["rows"](asyncio.run(item_of(RECORDING, BLOBS)), Losses())
    assert [(1, 2), (6, 2)] == [(span.offset, span.length) for span in line["media"]]
    assert PROCESSOR == line["processor"]


def test_outputs_for_verl_have_the_pictures(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for suffix in (".jsonl", ".parquet"):
        assert 1 == asyncio.run(written("verl", tmp_path / f"rows{suffix}", RECORDING, BLOBS))
    line = json.loads((tmp_path / "rows.jsonl").read_bytes())
    (row,) = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert {"images": [url_of(blob) for blob in BLOBS]} == line["multi_modal_data"] == row["multi_modal_data"]
    assert [1, 9, 9, 2] == line["prompt_ids"]
    about = line["extra_fields"]["agl"]
    assert PROCESSOR == about["processor"]
    assert [blob.digest for blob in BLOBS] == [span["digest"] for span in about["media"]]


@pytest.mark.parametrize(("form", "blobs", "says"), [("verl", 1, "no longer has"), ("tinker", 2, "rows with pictures")])
def test_rows_that_cannot_have_their_pictures_are_left_out_and_counted(
    tmp_path: Path, form: str, blobs: int, says: str
) -> None:
    path = tmp_path / "rows.jsonl"
    assert 0 == asyncio.run(written(form, path, RECORDING, BLOBS[:blobs]))
    assert b"" == path.read_bytes()
    assert [True] == [says in what for what in lost(path) if "left out" in what]


def rows_for_trl(path: Path) -> list[dict[str, Any]]:
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = ("messages", "tools")
    found = parquet.read_table(path).to_pylist()
    return [{**row, **{name: json.loads(row[name]) for name in texts}} for row in found]


def test_dialogue_for_trl_has_placeholders_and_the_pictures_in_order(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.parquet"
    assert 1 == asyncio.run(written("trl", path, RECORDING, BLOBS))
    (row,) = rows_for_trl(path)
    assert [blob.data for blob in BLOBS] == [image["bytes"] for image in row["images"]]
    assert {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]} == row["messages"][2]
    assert [] == lost(path)


def test_dialogues_that_trl_cannot_take_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.parquet"
    tool = {**shown(BLOBS[0], "a chart"), "role": "tool", "tool_call_id": "c"}
    asked = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]}
    talk = [answered("hi") | {"role": "user"}, asked, tool, answered("up")]
    from_a_tool = recording_of_calls([call_of(talk, [1], [5], [])])
    for recording, blobs in ((from_a_tool, BLOBS), (RECORDING, BLOBS[:1])):
        assert 0 == asyncio.run(written("trl", path, recording, blobs))
        assert ["dialogues with a picture"] == [what[:24] for what in lost(path)]


def test_arguments_for_trl_are_objects(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.parquet"
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    talk = [{"role": "user", "content": "hi"}, asked]
    assert 1 == asyncio.run(written("trl", path, recording_of_calls([call_of(talk, [1], [5], [])]), []))
    (row,) = rows_for_trl(path)
    assert {"a": 1} == row["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert [] == row["messages"][1]["content"] == row["images"]


def test_trajectory_brings_its_pictures_back(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert 1 == asyncio.run(written("atif", path, RECORDING, BLOBS))
    assert not [what for what in lost(path) if what.startswith("parts")]

    async def work() -> Any:
        store = MemoryStore()
        files, _ = find_files([path], "auto")
        await import_files(store, files, Target(experiment="again"), lost={}, is_dry=False)
        return [item async for item in recorded(store, RolloutQuery(), None)]

    (item,) = asyncio.run(work())
    (before,), (after,) = episode_of(RECORDING).rows, item.episode.rows
    assert unpack_ids(before.ids) == unpack_ids(after.ids)
    assert (before.media, before.processor) == (after.media, after.processor)
    assert {blob.digest: blob for blob in BLOBS} == item.blobs
    call = next(span.call for span in item.recording.spans if span.call)
    assert BLOBS[0].digest == call.request["messages"][0]["content"][0]["image_url"]["url"]


def test_trajectory_without_a_gone_picture_says_so(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert 1 == asyncio.run(written("atif", path, RECORDING, BLOBS[:1]))
    assert ["parts of messages"] == [what[:17] for what in lost(path) if what.startswith("parts")]


def test_imported_dialogue_has_its_pictures_as_blobs(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    user = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(BLOBS[0])}}]}
    path.write_text(json.dumps({"messages": [user, answered("A cat.")]}), encoding="utf-8")

    async def work() -> tuple[Any, list[Blob]]:
        store = MemoryStore()
        files, _ = find_files([path], "auto")
        await import_files(store, files, Target(experiment="again"), lost={}, is_dry=False)
        items = [item async for item in recorded(store, RolloutQuery(), None)]
        return items[0], await store.blobs([BLOBS[0].digest])

    item, blobs = asyncio.run(work())
    assert BLOBS[:1] == blobs
    assert (BLOBS[0].digest,) == next(span.call for span in item.recording.spans if span.call).inputs
