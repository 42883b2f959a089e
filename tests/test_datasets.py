"""Tasks from pandas, pyarrow and Hugging Face's ``datasets``, as these libraries make them."""

from pathlib import Path

import pytest

import agl
from agl.errors import DatasetError
from agl_run import Quiet

pandas = pytest.importorskip("pandas")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")
ROWS = [{"q": "one", "n": 1, "x": 0.5}, {"q": "two", "n": 2, "x": None}]


def tasks_of(data: object, folder: Path) -> list[object]:
    trainer = agl.Trainer(store="memory://", name="tables", progress=Quiet(), folder=folder)
    return list(trainer.plan(lambda task: 1.0, data).train)  # type: ignore[arg-type]


def test_rows_of_a_pandas_frame_are_tasks_with_null_for_missing_values(tmp_path):
    frame = pandas.DataFrame(ROWS).astype({"n": "int64", "x": "float64"})
    assert ROWS == tasks_of(frame, tmp_path)


def test_rows_of_a_parquet_file_are_tasks(tmp_path):
    pandas.DataFrame(ROWS).to_parquet(tmp_path / "tasks.parquet")
    assert ROWS == tasks_of("tasks.parquet", tmp_path)


def test_rows_of_an_arrow_table_are_tasks(tmp_path):
    table = datasets.Dataset.from_list(ROWS).data.table
    assert ROWS == tasks_of(table, tmp_path)


def test_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "tasks.parquet").write_bytes(b"q,a")
    with pytest.raises(DatasetError, match=r"cannot read the dataset .* as Parquet: "):
        tasks_of("tasks.parquet", tmp_path)


def test_rows_of_a_hugging_face_data_set_are_tasks_in_memory_and_saved(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "saved")
    assert ROWS == tasks_of(data, tmp_path)
    assert ROWS == tasks_of("saved", tmp_path)


def test_data_set_with_several_splits_is_refused_with_their_names(tmp_path):
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    splits.save_to_disk(tmp_path / "saved")
    for data in (splits, "saved"):
        with pytest.raises(DatasetError, match=r"is a DatasetDict with the keys \['train'\], not a list of tasks"):
            tasks_of(data, tmp_path)


def test_value_that_is_no_json_is_refused_with_its_row(tmp_path):
    frame = pandas.DataFrame({"at": [pandas.Timestamp("2026-01-01")], "z": [1j]})
    with pytest.raises(DatasetError, match=r"train\[0\] is not JSON"):
        tasks_of(frame, tmp_path)
