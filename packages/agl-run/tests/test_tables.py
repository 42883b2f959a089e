"""Data sets from CSV files, and from files that need a library which is not installed."""

import gzip
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import agl
from agl.errors import DatasetError
from agl_run import Quiet


def tasks_of(data: object, folder: Path) -> list[object]:
    """Return the tasks that an experiment reads from ``data``."""
    trainer = agl.Trainer(store="memory://", name="tables", progress=Quiet(), folder=folder)
    return list(trainer.plan(lambda task: 1.0, data).train)  # type: ignore[arg-type]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def write(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


def test_rows_of_a_csv_file_are_tasks_of_texts(write, tmp_path):
    write("tasks.csv", '\ufeffquestion,answer\n"1,000 + 1?",1001\n\n"two\nlines",é\n'.encode())
    expected = [{"question": "1,000 + 1?", "answer": "1001"}, {"question": "two\nlines", "answer": "é"}]
    assert expected == tasks_of("tasks.csv", tmp_path)


def test_tabs_separate_the_values_of_a_tsv_file(write, tmp_path):
    write("tasks.tsv", b"q\ta\n1, 2\t3\n")
    assert [{"q": "1, 2", "a": "3"}] == tasks_of("tasks.tsv", tmp_path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"q,a\n1,2\n1,2,3\n", ":3: 3 values for the 2 columns ['q', 'a']; write a value that contains the separator"),
        (b"q,q\n1,2\n", ":1: two columns have one name: ['q', 'q']"),
        (b"q,a\n", "is empty; it needs one row below its header"),
        (b"", "is empty; it needs one row below its header"),
        (b"q\n\xff\n", "as CSV: 'utf-8' codec can't decode"),
        (b'q\n"open\n', "as CSV: unexpected end of data"),
    ],
)
def test_wrong_csv_file_is_refused_with_its_place(data, says, write, tmp_path):
    write("tasks.csv", data)
    with pytest.raises(DatasetError) as caught:
        tasks_of("tasks.csv", tmp_path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1}\n{"a": 999999999999999999999999999999}\n', ", line 2: .* ints"),
        (b'[{"a": 1}, {"a": 999999999999999999999999999999}]', ", task 2: .* ints"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, ":1: not JSON: .*recursion"),
        (b"[" * 3000 + b"]" * 3000, ":1: not JSON: .*recursion"),
    ],
    ids=["line", "array", "deep line", "deep array"],
)
def test_json_that_no_store_takes_is_refused_with_its_place(data, says, write, tmp_path):
    write("tasks.jsonl", data)
    with pytest.raises(DatasetError, match=f"tasks.jsonl{says}"):
        tasks_of("tasks.jsonl", tmp_path)


@pytest.mark.parametrize("value", [10**30, b"\x89PNG", {"image": {"bytes": b"\x89PNG"}}], ids=["int", "bytes", "image"])
def test_value_that_no_store_takes_is_refused_with_its_row(value, tmp_path):
    with pytest.raises(DatasetError, match=r"train\[1\] is not JSON"):
        tasks_of([{"a": 1}, {"a": value}], tmp_path)


def test_near_name_of_a_csv_file_is_suggested(write, tmp_path):
    write("train.csv", b"q\n1\n")
    with pytest.raises(DatasetError, match=r"did you mean 'train\.csv'"):
        tasks_of("trian.csv", tmp_path)


def test_parquet_file_without_its_library_is_answered_with_the_line_that_installs_it(write, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as if it were not installed
    write("tasks.parquet", b"PAR1")
    with pytest.raises(DatasetError, match=r"tasks\.parquet' needs pyarrow; run: pip install pyarrow$"):
        tasks_of("tasks.parquet", tmp_path)


def test_saved_data_set_without_its_library_is_answered_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"saved' needs datasets; run: pip install datasets$"):
        tasks_of("saved", tmp_path)


def test_mapping_of_splits_is_refused_with_their_names(tmp_path):
    with pytest.raises(DatasetError, match=r"train is a dict with the keys \['train', 'test'\], not a list of tasks"):
        tasks_of({"train": [1], "test": [2]}, tmp_path)


def test_frames_that_offer_their_rows_are_read(tmp_path):
    frame = SimpleNamespace(columns=["n"], to_dicts=lambda: [{"n": 1}, {"n": 2}])  # as polars does
    assert [{"n": 1}, {"n": 2}] == tasks_of(frame, tmp_path)


def test_values_of_a_csv_file_may_be_long_and_separated_by_semicolons(write, tmp_path):
    write("long.csv", b"q,a\n" + b"x" * 200_000 + b",1\n")
    write("other.csv", b"q;a\n1,5;2\n")
    assert [{"q": "x" * 200_000, "a": "1"}] == tasks_of("long.csv", tmp_path)
    assert [{"q": "1,5", "a": "2"}] == tasks_of("other.csv", tmp_path)


@pytest.mark.parametrize("change", [lambda data: b"\xef\xbb\xbf" + data, gzip.compress], ids=["mark", "gzip"])
def test_json_lines_may_be_packed_or_begin_with_a_byte_order_mark(write, tmp_path, change):
    write("tasks.jsonl", change(b'{"q": 1}\n{"q": 2}\n'))
    assert [{"q": 1}, {"q": 2}] == tasks_of("tasks.jsonl", tmp_path)


def test_missing_number_is_none_from_every_format(write, tmp_path):
    write("tasks.jsonl", b'{"q": NaN}\n')
    assert [{"q": None}] == tasks_of("tasks.jsonl", tmp_path) == tasks_of([{"q": float("nan")}], tmp_path)


def test_cells_of_a_data_frame_may_hold_arrays(tmp_path):
    pandas, numpy = pytest.importorskip("pandas"), pytest.importorskip("numpy")
    frame = pandas.DataFrame({"q": [numpy.array([1, 2]), numpy.array([float("nan")])], "n": [1.5, float("nan")]})
    assert [{"q": [1, 2], "n": 1.5}, {"q": [None], "n": None}] == tasks_of(frame, tmp_path)


def test_dataset_that_is_a_named_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "tasks.jsonl")
    with pytest.raises(DatasetError, match="is not a file"):
        tasks_of("tasks.jsonl", tmp_path)
