"""Files that somebody sent, with hostile values in every place: nothing outside of them changes, nothing forged counts.

The test walks every reader: the formats of imports, the files and tables of an archive, the files of a store, and the
kinds of data sets. A new one is walked without a change here; a new format of imports needs a sample.
"""

import asyncio
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from agl.errors import AglError, DatasetError
from agl.schemas import Rollout, encode
from agl.stores import MemoryStore, check_recording
from agl_data.archive.layout import TABLES
from agl_data.importing.importer import find_files
from agl_data.importing.readers import FORMATS
from agl_data.importing.runs import Target
from agl_run.config import dataset
from agl_store_sqlite._store import SQLiteStore

from .archive.conftest import archive, contents, record, record_context, restore

_logs = import_module(f"{__package__}.import.logs")  # ``import`` is a keyword
RECORDED = Path(__file__).parent / "import" / "recorded"

HOSTILE = ("../../x", "/etc/passwd", "a\0b", -1, -(2**63), 2**64, 1e308, [], {}, True)
LONG = "i" * 1_000_000


def lines_of(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    return [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def otlp() -> list[Any]:
    call = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": '[{"role": "user", "content": "Hello"}]'}
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in call.items()]
    times = {"startTimeUnixNano": "1700000000000000000", "endTimeUnixNano": "1700000001000000000"}
    span = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "chat", "attributes": attributes, **times}
    return [{"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}]


SAMPLES: dict[str, Callable[[Path], list[Any]]] = {
    "chat": lambda _: [_logs.chat("2 + 2?", "4", score=1)],
    "claude-code": lambda folder: lines_of(_logs.claude_session(folder / "sample.jsonl")),
    "codex": lambda folder: lines_of(_logs.codex_session(folder / "sample.jsonl")),
    "agent-lightning": lambda _: _logs.lightning_events(),
    "atif": lambda _: [_logs.trajectory()],
    "otlp": lambda _: otlp(),
    "langfuse": lambda _: lines_of(RECORDED / "langfuse-trace.json"),
    "langsmith": lambda _: lines_of(RECORDED / "langsmith.jsonl"),
    "mlflow": lambda _: lines_of(RECORDED / "mlflow.json"),
}


def forged(value: Any, hostile: tuple[Any, ...] = HOSTILE) -> Iterator[Any]:
    """Yield copies of a JSON value, each with a hostile value in the place of one text, number, list or object."""
    yield from hostile
    if isinstance(value, str):
        yield LONG
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(value.items())
    else:
        items = list(enumerate(value))[:3] if isinstance(value, list) else []
    for place, each in items:
        for other in forged(each, hostile):
            copy = value.copy()
            copy[place] = other
            yield copy


def snapshot(folder: Path) -> dict[str, Any]:
    """Return the contents of all files outside of the folders ``sent`` and ``store``."""
    paths = (path for path in sorted(folder.rglob("*")) if path.relative_to(folder).parts[0] not in ("sent", "store"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def sent(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder for the files that were sent, and check that nothing next to it has changed at the end."""
    (tmp_path / "outside" / "manifests").mkdir(parents=True)
    for name in ("x", "outside/x", "outside/manifests/x.json"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "sent").mkdir()
    before = snapshot(tmp_path)
    yield tmp_path / "sent"
    assert before == snapshot(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.timeout(120)
def test_import_accepts_no_forged_value(name: str, sent: Path) -> None:
    lines = SAMPLES[name](sent)
    path = sent / "runs.jsonl"
    for number, line in enumerate(lines[:6]):
        for other in forged(line):
            _logs.write_lines(path, [*lines[:number], other, *lines[number + 1 :]])
            with suppress(DatasetError):
                for run in FORMATS[name].read(path):
                    recording = run.recording(Target("old"), format=name, task={}, copy=0, now=1.0)
                    check_recording(recording)
                    rollout = recording.rollout
                    assert ("old", "im-") == (rollout.experiment, rollout.rollout_id[:3])
                    assert 0 < rollout.started_at <= rollout.finished_at < 1e10
                    assert all(0 <= span.start_ns <= span.end_ns < 2**63 for span in recording.spans)
                    encode(recording)


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive") / "whole"

    async def work() -> None:
        store = MemoryStore()
        await record_context(store)
        await record(store, ids=[1])
        await archive(store, str(folder))

    asyncio.run(work())
    return folder


def check_restore(folder: Path) -> None:
    """Restore into a store in which a rollout runs: it must stay, and only the archive's own rollout may be new."""

    async def work() -> None:
        store = MemoryStore()
        await store.enqueue([Rollout(rollout_id="victim", task=1)])
        await store.claim(worker="w", lease_s=1e9)
        (victim,) = (await contents(store))["recordings"]
        with suppress(AglError):
            await restore(store, str(folder))
        found = {each["rollout"]["rollout_id"]: each for each in (await contents(store))["recordings"]}
        assert (victim, set()) == (found.pop("victim"), set(found) - {"sums-001"})
        for span in (span for each in found.values() for span in each.get("spans", ()) if span.get("reward")):
            assert math.isfinite(span["reward"]["value"])

    asyncio.run(work())


@pytest.mark.long
def test_archive_accepts_no_forged_value(archived: Path, sent: Path) -> None:
    folder = sent / "archive"
    shutil.copytree(archived, folder)
    (manifest,) = folder.glob("*/manifests/*.json")
    for path in folder.rglob("*.json"):
        whole = path.read_bytes()
        for other in forged(json.loads(whole)):
            path.write_text(json.dumps(other))
            check_restore(folder)
        path.write_bytes(whole)
    for path in folder.rglob("*.parquet"):
        whole, about, table = path.read_bytes(), json.loads(manifest.read_text()), parquet.read_table(path)
        (first, *others) = table.to_pylist()
        for other in forged(msgspec.msgpack.decode(first["record"]), (HOSTILE[0], -1, 2**63 - 1, [])):
            row = {**first, "record": msgspec.msgpack.encode(other)}
            parquet.write_table(pyarrow.Table.from_pylist([row, *others], schema=table.schema), path)
            if path.parent.name in TABLES:
                sums = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
                files = {**about["files"], path.parent.name: {**about["files"][path.parent.name], **sums}}
                manifest.write_text(json.dumps({**about, "files": files}))
            check_restore(folder)
        path.write_bytes(whole)
        manifest.write_text(json.dumps(about))


def link_to_file(path: Path) -> None:
    path.symlink_to(path.parents[len(path.parts) - path.parts.index("sent")] / "x")


def link_to_folder(path: Path) -> None:
    path.symlink_to(path.parents[len(path.parts) - path.parts.index("sent")] / "outside")


ODD = {"link": link_to_file, "link to a folder": link_to_folder, "pipe": os.mkfifo}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.timeout(120)
def test_links_and_pipes_in_an_archive_change_nothing_outside(archived: Path, sent: Path, kind: str) -> None:
    async def archive_again(folder: Path) -> None:
        store = MemoryStore()
        await record(store, ids=[1, 2])
        with suppress(AglError):
            await archive(store, str(folder), is_removing=True)

    for name in [path.relative_to(archived) for path in archived.rglob("*")]:
        folder = sent / "archive"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(archived, folder)
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        ODD[kind](path)
        check_restore(folder)
        asyncio.run(archive_again(folder))


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.timeout(120)
def test_links_and_pipes_beside_a_store_change_nothing_outside(sent: Path, kind: str) -> None:
    path = sent / "runs.db"

    async def use() -> list[str]:
        store = SQLiteStore(f"sqlite:///{path}", busy_s=0.1)
        await store.save_state({"a": b"1"})
        names = [each.name for each in sent.iterdir()]
        await store.close()
        return names

    names = asyncio.run(use())
    assert {"runs.db", "runs.db-wal", "runs.db-shm", "runs.db-acknowledged"} <= {*names}
    for name in (*names, "runs.db-journal"):
        own = sent / name
        whole = own.read_bytes() if own.exists() else None
        own.unlink(missing_ok=True)
        if name != "runs.db" or kind == "pipe":  # a store may itself be a link
            ODD[kind](own)
            with suppress(AglError):
                asyncio.run(use())
            own.unlink(missing_ok=True)
        if whole is not None:
            own.write_bytes(whole)


@pytest.mark.parametrize("suffix", dataset._SUFFIXES)
@pytest.mark.timeout(20)
def test_data_set_that_is_a_pipe_is_refused(sent: Path, suffix: str) -> None:
    os.mkfifo(sent / f"tasks{suffix}")
    with pytest.raises(DatasetError, match="is not a file"):
        dataset.load_dataset(sent / f"tasks{suffix}")


def test_folder_of_an_import_leads_nowhere_else(sent: Path) -> None:
    for number, make in enumerate(ODD.values()):
        make(sent / f"{number}.jsonl")
    _logs.write_lines(sent / "own.jsonl", SAMPLES["chat"](sent))
    files, _ = find_files([sent], "auto")
    assert ["own.jsonl"] == [file.path.name for file in files]
