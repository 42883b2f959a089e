"""Exported calls with pictures have the pictures, or the losses say that they do not."""

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agl.contracts import MAX_BLOB_BYTES, RolloutQuery
from agl.schemas import Blob, Reward, digest_of, unpack_ids
from agl.semconv import TOOL_RESULT
from agl.stores import MemoryStore
from agl.tracing import make_reward_span
from agl_data.export.command import _LINES
from agl_data.export.preferences import recorded
from agl_data.importing.importer import Imported, find_files, import_files
from agl_data.importing.runs import Target
from agl_inspect.exports import Exported, Losses
from agl_store_sqlite import SQLiteStore
from agl_testing.commands import invoke_agl

from .conftest import episode_of
from .picture_world import (
    PROCESSOR,
    answered,
    call_of,
    item_of,
    recording_of_calls,
    shown,
    store_of,
    two_turns,
    write_from,
    written,
)
from .worlds import recording_of

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


class Watched(MemoryStore):
    """A store that counts the blobs that it is asked for."""

    asked = 0

    async def blobs(self, digests: Sequence[str]) -> list[Blob]:
        self.asked += len(digests)
        return await super().blobs(digests)


@pytest.mark.parametrize(("form", "read"), [("langfuse", 0), ("atif", 2)])
def test_only_formats_that_write_pictures_read_them(form: str, read: int, tmp_path: Path) -> None:
    async def work() -> int:
        store = await store_of(RECORDING, BLOBS, Watched())
        await write_from(store, form, tmp_path / "out.jsonl")
        return store.asked

    assert read == asyncio.run(work())


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
    return [{**row, "messages": json.loads(row["messages"])} for row in parquet.read_table(path).to_pylist()]


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
    from_a_tool = recording_of_calls([call_of(talk, [1], [5], [], inputs=(BLOBS[0].digest,))])
    document = Blob(digest=digest_of(b"%PDF-"), media_type="application/pdf", data=b"%PDF-")
    read = call_of([shown(document, "Read it."), answered("Done.")], [1], [5], [], inputs=(document.digest,))
    with_a_document = recording_of_calls([read])
    for recording, blobs in ((from_a_tool, BLOBS), (RECORDING, BLOBS[:1]), (with_a_document, [document])):
        assert 0 == asyncio.run(written("trl", path, recording, blobs))
        assert ["dialogues with a picture"] == [what[:24] for what in lost(path)]


def test_dialogues_with_tools_are_left_out_for_trl_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.parquet"
    call = call_of([shown(BLOBS[0], "What is it?"), answered("A cat.")], [1], [5], [], inputs=(BLOBS[0].digest,))
    tools = [{"type": "function", "function": {"name": "f"}}]
    recording = recording_of_calls([replace(call, request={**call.request, "tools": tools})])
    assert 0 == asyncio.run(written("trl", path, recording, BLOBS))
    assert ["dialogues with tools"] == [what[:20] for what in lost(path)]


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


def imported(path: Path) -> tuple[Imported, list[Exported]]:
    """Import a file into a new store; returns the result, and the rollouts as an export reads them."""

    async def work() -> tuple[Imported, list[Exported]]:
        store = MemoryStore()
        files, _ = find_files([path], "auto")
        result = await import_files(store, files, Target(experiment="again"), lost=Counter(), is_dry=False)
        return result, [item async for item in recorded(store, RolloutQuery(), None)]

    return asyncio.run(work())


def calls_of(item: Exported) -> list[Any]:
    return [span.call for span in item.recording.spans if span.call]


def test_trajectory_brings_its_pictures_back(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert 1 == asyncio.run(written("atif", path, RECORDING, BLOBS))
    assert not [what for what in lost(path) if what.startswith("parts")]
    _, (item,) = imported(path)
    (before,), (after,) = episode_of(RECORDING).rows, item.episode.rows
    assert unpack_ids(before.ids) == unpack_ids(after.ids)
    assert (before.media, before.processor) == (after.media, after.processor)
    assert {blob.digest: blob for blob in BLOBS} == item.blobs
    assert BLOBS[0].digest == calls_of(item)[0].request["messages"][0]["content"][0]["image_url"]["url"]


def test_trajectory_brings_the_picture_of_a_tool_back(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    function = {"name": "look", "arguments": "{}"}
    asked = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    screenshot = {**shown(BLOBS[0], "the screen"), "role": "tool", "tool_call_id": "c"}
    talk = [{"role": "user", "content": "Look."}, asked, screenshot, answered("A cat.")]
    calls = [call_of(talk[:2], [1], [5], []), call_of(talk, [1], [6], [], inputs=(BLOBS[0].digest,))]
    assert 1 == asyncio.run(written("atif", path, recording_of_calls(calls), BLOBS))
    _, (item,) = imported(path)
    assert {BLOBS[0].digest: BLOBS[0]} == item.blobs
    assert screenshot == calls_of(item)[1].request["messages"][2]
    (tool,) = [span for span in item.recording.spans if TOOL_RESULT in span.attributes]
    assert screenshot["content"] == json.loads(str(tool.attributes[TOOL_RESULT]))


def test_task_that_is_a_picture_holds_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    asked = {"role": "user", "content": shown(BLOBS[0], "")["content"][:1]}
    calls = [call_of([asked, answered("A cat.")], [1], [5], [], inputs=(BLOBS[0].digest,))]
    assert 1 == asyncio.run(written("atif", path, recording_of_calls(calls), BLOBS))
    _, (item,) = imported(path)
    assert {"prompt": asked["content"]} == item.recording.rollout.task


def test_trajectory_without_a_gone_picture_says_so(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert 1 == asyncio.run(written("atif", path, RECORDING, BLOBS[:1]))
    assert ["parts of messages"] == [what[:17] for what in lost(path) if what.startswith("parts")]


def chat_file(folder: Path, content: Any, **more: Any) -> Path:
    path = folder / "chats.jsonl"
    messages = [{"role": "user", "content": content}, answered("A cat.")]
    path.write_text(json.dumps({"messages": messages, **more}), encoding="utf-8")
    return path


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


RAW = {"type": "input_audio", "input_audio": {"data": base64.b64encode(BLOBS[0].data).decode(), "format": "wav"}}


@pytest.mark.parametrize(
    ("part", "reference", "blobs"),
    [
        (image_part(url_of(BLOBS[0])), BLOBS[0].digest, {BLOBS[0].digest: BLOBS[0]}),
        (image_part("https://example.com/cat.png"), "https://example.com/cat.png", {}),
        (image_part("pictures/cat.png"), "pictures/cat.png", {}),
        (RAW, BLOBS[0].digest, {BLOBS[0].digest: BLOBS[0]}),
    ],
    ids=["data-url", "url", "path", "base64"],
)
def test_imported_call_has_its_media_as_inputs_and_blobs(
    tmp_path: Path, part: dict[str, Any], reference: str, blobs: dict[str, Blob]
) -> None:
    _, (item,) = imported(chat_file(tmp_path, [part]))
    (call,) = calls_of(item)
    assert (reference,) == call.inputs
    assert reference in json.dumps(call.request)
    assert blobs == item.blobs


@pytest.mark.parametrize("words", ["Hello.", "Explain base64."])
def test_imported_call_has_no_headers_of_remote_tools(tmp_path: Path, words: str) -> None:
    tools = [{"type": "mcp", "server_label": "wiki", "headers": {"Authorization": "Bearer secret"}}]
    _, (item,) = imported(chat_file(tmp_path, words, tools=tools))
    assert [{"type": "mcp", "server_label": "wiki"}] == calls_of(item)[0].request["tools"]


def test_payload_that_no_store_takes_is_counted_and_named_by_digest(tmp_path: Path) -> None:
    data = BLOBS[0].data.ljust(MAX_BLOB_BYTES + 1, b"0")
    large = Blob(digest=digest_of(data), media_type="image/png", data=data)
    result, (item,) = imported(chat_file(tmp_path, [image_part(url_of(large)), {"type": "text", "text": "Hi."}]))
    assert (large.digest,) == calls_of(item)[0].inputs
    assert {} == item.blobs
    assert [1] == [count for what, count in result.lost.items() if what.startswith("payloads of more than 20 MB")]


@pytest.mark.parametrize(
    ("form", "least", "reads"),
    [
        *(("messages", 0.5, 1), ("messages", 2.0, 0), ("dpo", 0.5, 2), ("dpo", 2.0, 0), ("atif", 2.0, 0)),
        *((form, 0.5, 0) for form in ("transitions", "rows", "spans")),
    ],
)
def test_pictures_are_read_only_for_lines_that_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, least: float, reads: int
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    asyncio.run(fill_with_two_rewards(url))
    asked: list[Sequence[str]] = []
    blobs = SQLiteStore.blobs

    async def counted(store: SQLiteStore, digests: Sequence[str]) -> list[Blob]:
        asked.append(digests)
        return await blobs(store, digests)

    monkeypatch.setattr(SQLiteStore, "blobs", counted)
    output = str(tmp_path / "out.jsonl")
    words = ("--store", url, "--format", form, "--min-reward", str(least), "--output", output)
    invoke_agl("data", "export", *words, folder=tmp_path)
    assert reads == len(asked)


async def fill_with_two_rewards(url: str) -> None:
    """Write two rollouts of a task, with a picture each and the rewards 0 and 1."""
    store = SQLiteStore(url)
    try:
        await store.save_blobs(BLOBS)
        for number in range(2):
            talk = [shown(BLOBS[0], "What is it?"), answered(f"{number} cats.")]
            call = call_of(talk, [1], [5], [], inputs=(BLOBS[0].digest,))
            reward = make_reward_span("", "", Reward(value=float(number)))
            spans = [
                replace(span, rollout_id=f"ro-{number}", attempt_id=f"ro-{number}.1")
                for span in [*recording_of_calls([call]).spans, reward]
            ]
            await store.restore([recording_of(spans, f"ro-{number}")])
    finally:
        await store.close()
