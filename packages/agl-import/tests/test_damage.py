"""Files that are cut, huge, hostile or of another kind: one paragraph, and nothing half imported."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agl.errors import AglError, ConfigError, DatasetError
from agl_import.importer import find_files, import_files
from agl_import.runs import Target
from agl_testing.commands import run_agl
from agl_testing.waiting import wait_until

from .conftest import Imports
from .logs import chat, write_lines


def test_file_of_no_known_format_is_refused_with_those_that_are_read(tmp_path: Path, imports: Imports) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])

    with pytest.raises(
        DatasetError, match=r"no known format \(it has completion, prompt\); the formats are chat .*otlp"
    ):
        imports(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "holds no record"),
        (b"\n \n", "holds no record"),
        (b"\xff\xfe\x00", "line 1 is no JSON .*nothing was imported"),
        (b'{"messages": NaN}\n', "line 1 is no JSON .*NaN is no number of JSON"),
        (b"[" * 100_000, "line 1 is no JSON .*nested too deeply"),
        (b"PK\x03\x04rest", "is an archive, of which only gzip and zstd are read"),
        (b"\x1f\x8brest", "is cut or damaged|cannot read"),
        (b'{"messages": [{"role": "wizard", "content": "a"}]}', "message 1 has the role 'wizard'; use one of"),
        (b'{"messages": ["a"]}', "line 1 has no list of messages"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "the content of message 1 is no text"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "has no message of the assistant"),
    ],
    ids=["empty", "blank", "binary", "nan", "deep", "zip", "gzip", "role", "messages", "content", "question"],
)
def test_damaged_file_is_refused_in_one_paragraph(data: bytes, says: str, tmp_path: Path, imports: Imports) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)

    with pytest.raises(AglError, match=says) as refused:
        imports(path)
    assert "\n" not in str(refused.value)


def test_damage_in_the_last_file_leaves_the_first_one_out_too(tmp_path: Path, imports: Imports) -> None:
    whole = write_lines(tmp_path / "a.jsonl", [chat("a", "b")])
    cut = write_lines(tmp_path / "b.jsonl", [chat("c", "d"), chat("e", "f")])
    cut.write_bytes(cut.read_bytes()[:-10])

    with pytest.raises(DatasetError, match=r"b.jsonl, line 2 is no JSON .*the file may be cut"):
        imports(whole, cut)
    assert [] == imports.recordings()


def test_compressed_file_is_read_and_a_cut_one_refused(tmp_path: Path, imports: Imports) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(chat("a", "b")).encode()))
    assert 1 == imports(path).rollouts

    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DatasetError, match="is cut or damaged"):
        imports(path)


@pytest.mark.parametrize("unit", [b" ", b" " * 0xFFFF + b"\n"], ids=["a line", "lines"])
def test_bomb_of_gzip_is_refused(unit: bytes, tmp_path: Path, imports: Imports) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        block = unit * ((1 << 20) // len(unit))
        for _ in range(80):
            file.write(block)

    with pytest.raises(DatasetError, match=r"grows to more than 200 times its size|has a line of more than 64 MiB"):
        imports(path)
    assert [] == imports.recordings()


def test_file_that_changes_between_its_two_readings_is_refused(tmp_path: Path, imports: Imports) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat("a", "b")])
    files, lost = find_files([path], "auto")
    write_lines(path, [chat("a", "b"), chat("c", "d")])
    target = Target(experiment="old")

    with pytest.raises(DatasetError, match=r"a.jsonl changed while it was read; import it again"):
        asyncio.run(import_files(None, files, target, lost=lost, is_dry=True))


def test_folder_with_a_link_out_of_it_leaves_that_file_out(tmp_path: Path, imports: Imports) -> None:
    outside = write_lines(tmp_path / "outside.jsonl", [chat("a", "b")])
    write_lines(tmp_path / "logs" / "inside.jsonl", [chat("c", "d")])
    (tmp_path / "logs" / "link.jsonl").symlink_to(outside)

    done = imports(tmp_path / "logs")
    assert (1, 1) == (done.rollouts, done.lost["files of a folder that are links out of it: left out"])


def test_folder_without_files_says_which_names_are_read(tmp_path: Path, imports: Imports) -> None:
    with pytest.raises(ConfigError, match=r"no file to import .*their names end in .jsonl"):
        imports(tmp_path)


def test_dry_run_writes_nothing_and_makes_no_store(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [chat("a", "b")])
    said = run_agl("import", "a.jsonl", "--dry-run", folder=tmp_path)

    assert said.startswith(
        "would import 1 run into 'imported' from 1 file of chat: 1 model call, 1 task, 0 new rewards\n"
    )
    assert not (tmp_path / "runs").exists()


def test_import_that_is_killed_is_completed_by_repeating_it(tmp_path: Path, imports: Imports) -> None:
    path = write_lines(tmp_path / "a.jsonl", (chat(f"What is {n} + 1?", str(n + 1) * 50) for n in range(6000)))
    words = [sys.executable, "-m", "agl", "import", str(path), "--experiment", "old", "--store", imports.url]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "runs").exists() and bool(imports.count()), within_s=120)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = imports.count()
    done = imports(path)

    assert 0 < before < 6000
    assert (6000 - before, before) == (done.rollouts, done.known)
    assert 6000 == imports.count()


MEASURE = """
import resource, sys
from agl_run.cli.main import main
try:
    main()
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""


def test_large_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    words = "lorem ipsum dolor sit amet " * 400
    write_lines(tmp_path / "small.jsonl", [chat("a", "b")])
    large = write_lines(tmp_path / "large.jsonl", (chat(f"{n} {words}", words[::-1]) for n in range(2600)))
    assert large.stat().st_size > 50 << 20

    def peak(name: str) -> int:
        command = [sys.executable, "-c", MEASURE, "import", name, "--store", f"sqlite:///{name}.db"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return int(done.stderr.split()[-1])

    assert peak("large.jsonl") < peak("small.jsonl") + 150
