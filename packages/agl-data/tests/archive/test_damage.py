"""Folders that are not archives, and damaged or too new archives, are refused in one paragraph; nothing is written."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import parquet

from agl.errors import AglError, ConfigError, SchemaVersionError, StoreError
from agl.stores import MemoryStore
from agl_data.archive.layout import TABLES
from agl_data.archive.places import Place

from .conftest import archive, ids, record, record_context, restore


@pytest.fixture
def archived(url) -> Path:
    async def work() -> None:
        store = MemoryStore()
        await record_context(store)
        await record(store)
        await archive(store, url)

    asyncio.run(work())
    return Path(url)


def refusal(url: Path | str) -> AglError:
    async def work() -> AglError:
        store = MemoryStore()
        with pytest.raises(AglError) as found:
            await restore(store, str(url))
        assert [] == await ids(store)
        assert "\n" not in str(found.value)
        return found.value

    return asyncio.run(work())


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (flip, "its checksum differs from the one in the manifest"),
        (lambda data: data[:-10], "bytes and should have"),
        (lambda data: b"", "it has 0 bytes and should have"),
        (None, "it is missing"),
    ],
    ids=["flipped", "truncated", "empty", "missing"],
)
def test_a_damaged_file_of_a_part_is_named(archived, table, change: Callable[[bytes], bytes] | None, says):
    (path,) = archived.glob(f"*/{table}/*")
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    error = refusal(archived)
    assert isinstance(error, StoreError)
    assert f"'sums/{table}/{path.name}' in the archive {archived} is damaged" in str(error)
    assert says in str(error)


@pytest.mark.parametrize("change", [lambda data: data[:-10], lambda data: b"x" * 100, lambda data: b""])
@pytest.mark.parametrize("table", ["versions", "labels"])
def test_a_damaged_table_of_an_experiment_is_named(archived, table, change):
    path = archived / "sums" / f"{table}.parquet"
    path.write_bytes(change(path.read_bytes()))
    assert f"'sums/{table}.parquet' in the archive {archived} is damaged" in str(refusal(archived))


@pytest.mark.parametrize("table", ["versions", "labels", "scores", "metrics"])
def test_a_changed_record_of_an_experiment_is_found(archived, table):
    path = archived / "sums" / f"{table}.parquet"
    group = parquet.read_metadata(path).row_group(0)
    (column,) = [each for each in map(group.column, range(group.num_columns)) if each.path_in_schema == "record"]
    last = column.data_page_offset + column.total_compressed_size - 1
    data = bytearray(path.read_bytes())
    data[last] ^= 1
    path.write_bytes(data)
    assert f"'sums/{table}.parquet' in the archive {archived} is damaged" in str(refusal(archived))


def test_a_damaged_manifest_is_named(archived):
    (path,) = archived.glob("*/manifests/*")
    path.write_text("{")
    assert f"'sums/manifests/{path.name}'" in str(refusal(archived))


def test_a_newer_format_is_refused(archived):
    (path,) = archived.glob("*/manifests/*")
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    error = refusal(archived)
    assert isinstance(error, SchemaVersionError)
    assert "has version 2 of the format, and this release reads up to 1; install a newer agl-data" in str(error)
    (archived / "agl-data.json").write_text('{"format": "agl-data", "version": 3, "of": "later"}')
    assert "'agl-data.json'" in str(refusal(archived))


def test_a_folder_that_is_no_archive_is_refused(tmp_path):
    assert "is not an archive: it has no file agl-data.json" in str(refusal(tmp_path))
    assert "is not an archive" in str(refusal(tmp_path / "nothing"))


def test_a_missing_backend_names_its_package():
    with pytest.raises(ConfigError, match=r"^the archive s3://bucket/runs needs .* not installed; pip install s3fs$"):
        Place("s3://bucket/runs")
    with pytest.raises(ConfigError, match=r"^the archive sftp://host/runs needs a package.* \"paramiko\""):
        Place("sftp://me:secret@host/runs")
    with pytest.raises(ConfigError, match="foo://x is not the address of an archive: Protocol not known"):
        Place("foo://x")


def test_a_folder_that_cannot_be_written_is_named(archived, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.fsync", refuse)

    async def work() -> None:
        store = MemoryStore()
        await record(store, ids=[9])
        with pytest.raises(StoreError, match=r"cannot write .* Permission denied; mend that"):
            await archive(store, str(archived))

    asyncio.run(work())
    assert [] == [path for path in archived.rglob(".*") if path.is_file()]
