"""Files that somebody else made change nothing outside of them, and bring no forged record into a store."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from msgspec.structs import replace
from pyarrow import parquet

from agl.contracts import Metric, RolloutQuery
from agl.errors import ConflictError, DatasetError, StoreError
from agl.schemas import Attempt, Reward, Rollout, Span, decode, encode
from agl.stores import MemoryStore
from agl_data.archive import arrow
from agl_data.importing.source import read_lines

from .conftest import archive, contents, record, record_context, restore

Rows = list[dict[str, Any]]


@pytest.fixture
def hostile(url) -> Path:
    """Return an archive of a single rollout, which the tests change."""

    async def work() -> None:
        store = MemoryStore()
        await record_context(store)
        await record(store, ids=[1])
        await archive(store, url)

    asyncio.run(work())
    return Path(url)


def change_manifest(folder: Path, **fields: Any) -> None:
    (path,) = folder.glob("*/manifests/*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewrite(folder: Path, table: str, change: Callable[[Rows], Rows]) -> None:
    """Change the rows of a table, and write the checksums anew as a forger would."""
    (path,) = folder.glob(f"*/{table}/*.parquet")
    found = parquet.read_table(path)
    parquet.write_table(pyarrow.Table.from_pylist(change(found.to_pylist()), schema=found.schema), path)
    (manifest,) = folder.glob("*/manifests/*.json")
    files = json.loads(manifest.read_text())["files"]
    data = path.read_bytes()
    files[table] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change_manifest(folder, files=files)


def forge(type_: type[Any], **fields: Any) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        return [{**row, "record": encode(replace(decode(row["record"], type_), **fields)), "moved": []} for row in rows]

    return change


def refused(folder: Path) -> str:
    """Restore into a store in which the rollout ``victim`` runs; nothing of the store may change."""

    async def work() -> str:
        store = MemoryStore()
        await store.enqueue([Rollout(rollout_id="victim", task=1)])
        await store.claim(worker="w")
        before = await contents(store)
        with pytest.raises(StoreError) as found:
            await restore(store, str(folder))
        after = await contents(store)
        assert before["recordings"] == after["recordings"]
        return str(found.value)

    return asyncio.run(work())


async def test_part_that_lacks_rows_is_named_and_the_others_are_restored(hostile: Path) -> None:
    rewrite(hostile, "spans", lambda rows: rows[:-1])

    first, store = MemoryStore(), MemoryStore()
    await record_context(first)
    await record(first, ids=[2, 3])
    await archive(first, str(hostile))
    for is_dry_run, known in ((True, []), (False, ["sums-002", "sums-003"])):
        with pytest.raises(StoreError) as found:
            await restore(store, str(hostile), is_dry_run=is_dry_run)
        assert re.search(r"sums/spans/part-\w+.parquet.* is damaged: it has 3 rows and should have 4", str(found.value))
        done = "would restore" if is_dry_run else "restored"
        assert str(found.value).endswith(f"; {done} 2 rollouts of whole parts")
        assert known == [rollout.rollout_id for rollout in await store.rollouts(RolloutQuery())]


async def test_damage_is_named_with_the_conflict_of_a_later_part(hostile: Path) -> None:
    rewrite(hostile, "spans", lambda rows: rows[:-1])

    first, store = MemoryStore(), MemoryStore()
    await record_context(first)
    await record(first, ids=[2])
    await archive(first, str(hostile))
    await store.enqueue([Rollout(rollout_id="sums-002", task="another")])
    with pytest.raises(ConflictError, match=r"'sums-002' is already .*; 'sums/spans/part-.* is damaged: it has 3"):
        await restore(store, str(hostile))


VICTIM = {"rollout_id": "victim", "attempt_id": "victim.1"}


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("spans", forge(Span, **VICTIM, reward=Reward(value=1e6))),
        ("spans", forge(Span, attempt_id="sums-001.7")),
        ("attempts", forge(Attempt, **VICTIM)),
        ("rollouts", forge(Rollout, rollout_id="victim")),
        ("rollouts", forge(Rollout, experiment="other")),
        ("rollouts", forge(Rollout, rollout_id="a/b")),
        ("rollouts", lambda rows: [*rows, *rows]),
        ("spans", lambda rows: [*rows[:-1], {**rows[-1], "rollout_id": "sums-009"}]),
        *((table, lambda rows: rows[:-1]) for table in ("spans", "attempts", "rollouts")),
        ("rollouts", lambda rows: [{**row, "record": b"\xc1"} for row in rows]),
        ("rollouts", lambda rows: [{**row, "moved": ["__class__"]} for row in rows]),
        ("rollouts", lambda rows: [{**row, "moved": ["task"], "task": "[" * 100_000} for row in rows]),
    ],
)
def test_forged_record_is_refused(hostile: Path, table: str, change: Callable[[Rows], Rows]) -> None:
    rewrite(hostile, table, change)
    assert "is damaged" in refused(hostile)


@pytest.mark.parametrize("fields", [{"part": "../../../precious"}, {"part": "/etc/passwd\0"}, {"experiment": ".."}])
def test_manifest_names_only_files_of_its_own_part(hostile: Path, tmp_path: Path, fields: dict[str, str]) -> None:
    for name in ("precious.parquet", "precious.json"):
        (tmp_path / name).write_text("keep")
    change_manifest(hostile, is_whole=False, **fields)

    async def work() -> None:
        store = MemoryStore()
        await record(store, ids=[1])
        await archive(store, str(hostile))

    with pytest.raises(StoreError, match="it describes"):
        asyncio.run(work())
    assert {"precious.parquet", "precious.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("text", ["null", "[]", "{", '{"part":1}', "[" * 100_000, '{"files":{}}'])
def test_manifest_of_another_form_is_named(hostile: Path, text: str) -> None:
    (path,) = hostile.glob("*/manifests/*.json")
    path.write_text(text)
    assert "is damaged" in refused(hostile)


def test_metrics_of_another_experiment_are_refused(hostile: Path) -> None:
    (path,) = hostile.glob("*/metrics.parquet")
    found = parquet.read_table(path)
    rows = forge(Metric, experiment="mine")(found.to_pylist())
    columns = [{name: value for name, value in row.items() if name in found.schema.names} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(columns, schema=found.schema), path)
    assert "metrics of other experiments" in refused(hostile)


def test_large_value_is_refused_before_it_is_read(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_MOST", 1 << 20)
    rewrite(hostile, "rollouts", lambda rows: [{**row, "task": '"' + "a" * (2 << 20) + '"'} for row in rows])
    assert "it has values of 2 MiB, and 1 are allowed" in refused(hostile)


def test_named_pipe_is_refused_instead_of_waited_for(hostile: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runs.jsonl")
    with pytest.raises(DatasetError, match="is not a file"):
        list(read_lines(tmp_path / "runs.jsonl"))
    (path,) = hostile.glob("*/spans/*.parquet")
    path.unlink()
    os.mkfifo(path)
    assert "it is missing" in refused(hostile)
