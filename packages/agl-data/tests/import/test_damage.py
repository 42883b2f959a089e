"""Importing a truncated, huge, hostile or unknown file prints one paragraph, and imports nothing."""

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
from agl.schemas import Json
from agl_data.importing.importer import find_files, import_files
from agl_data.importing.runs import Target
from agl_testing.commands import invoke_agl
from agl_testing.waiting import wait_until

from .conftest import Imports
from .logs import ClaudeLog, chat, trajectory, write_lines


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
        (b"\xff\xfe\x00", "line 1 is not JSON .*nothing was imported"),
        (b'{"messages": NaN}\n', "line 1 is not JSON .*NaN is not a number in JSON"),
        (b"[" * 100_000, "line 1 is not JSON .*nested too deeply"),
        (b"PK\x03\x04rest", "is an archive, of which only gzip and zstd are read"),
        (b"\x1f\x8brest", "is cut or damaged|cannot read"),
        (b'{"messages": [{"role": "wizard", "content": "a"}]}', "message 1 has the role 'wizard'; use one of"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "message 1 has the role .'user'.; use one of"),
        (b'{"messages": ["a"]}', "line 1 has no list of messages"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "the content of message 1 is neither a text"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "has no message of the assistant"),
    ],
    ids=["empty", "blank", "binary", "nan", "deep", "zip", "gzip", "role", "roles", "messages", "content", "question"],
)
def test_damaged_file_is_refused_in_one_paragraph(data: bytes, says: str, tmp_path: Path, imports: Imports) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)

    with pytest.raises(AglError, match=says) as refused:
        imports(path)
    assert "\n" not in str(refused.value)


HALF, LARGE = '[{"role": "user", "content": "a\\ud83d"}]', f'[{{"role": "user", "content": {10**30}}}]'
LLM = {"id": "a", "run_type": "llm", "trace_id": "a", "outputs": {"output": "b"}}


def spans(attributes: dict[str, Json], **fields: Json) -> dict[str, Json]:
    """Return an OTLP batch with the span of a model call; ``attributes`` are given as OTLP values."""
    about = {"gen_ai.operation.name": {"stringValue": "chat"}, **attributes}
    span = {"traceId": "a" * 32, "spanId": "b" * 16, "attributes": [{"key": k, "value": v} for k, v in about.items()]}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [{**span, **fields}]}]}]}


@pytest.mark.parametrize(
    "record",
    [
        spans({"gen_ai.input.messages": {"stringValue": HALF}}),
        spans({"gen_ai.input.messages": {"stringValue": LARGE}}),
        spans({"number": {"intValue": "9" * 30}}),
        {**LLM, "inputs": HALF},
        {**LLM, "inputs": LARGE},
        {"id": "a", "observations": [{"id": "b", "type": "GENERATION", "input": HALF}]},
        {
            "info": {"trace_id": "a"},
            "data": {
                "spans": [{"span_id": "b", "attributes": {"mlflow.spanType": '"LLM"', "mlflow.spanInputs": HALF}}]
            },
        },
    ],
    ids=["otlp half", "otlp large", "otlp number", "langsmith half", "langsmith large", "langfuse", "mlflow"],
)
def test_value_within_a_text_of_json_that_no_store_takes_is_replaced_and_counted(
    record: Json, tmp_path: Path, imports: Imports
) -> None:
    done = imports(write_lines(tmp_path / "a.jsonl", [record]))

    assert (1, 1) == (done.rollouts, done.calls)
    assert 1 == sum(count for text, count in done.lost.items() if "halves of characters" in text)


def test_lines_of_a_session_may_have_fields_of_any_type(tmp_path: Path, imports: Imports) -> None:
    log = ClaudeLog()
    log.ask([{"type": "text", "text": "Mend it", "tool_use_id": ["a"]}])
    log.answer(1, [{"type": "text", "text": "Done"}])

    assert 1 == imports(write_lines(tmp_path / "log.jsonl", log.lines)).calls


@pytest.mark.parametrize(
    "record",
    [
        spans({"gen_ai.request.seed": {"doubleValue": 1e300}, "a": {"intValue": "--5"}, "b": {"intValue": "9" * 5000}}),
        spans({}, startTimeUnixNano=float("inf"), status={"code": [1]}, kind={}),
        spans({"a": {"stringValue": ""}, "gen_ai.operation.name": {"arrayValue": {"values": []}}}),
        spans(
            {
                "openinference.span.kind": {"stringValue": "LLM"},
                "llm.invocation_parameters": {"stringValue": f'{{"temperature": {10**400}}}'},
            }
        ),
        {**LLM, "inputs": [], "extra": f'{{"invocation_params": {{"temperature": {10**400}}}}}'},
        {
            "id": "a",
            "observations": [{"id": "b", "type": "GENERATION", "metadata": {"agl": {"kind": {}, "status": []}}}],
        },
        {"info": {"trace_id": "a"}, "data": {"spans": [{"span_id": "b", "start_time_unix_nano": True}]}},
    ],
    ids=["numbers", "types", "operation", "settings", "langsmith", "langfuse", "mlflow"],
)
def test_field_of_another_type_is_passed_over(record: Json, tmp_path: Path, imports: Imports) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record).replace("Infinity", "1e999"))
    done = imports(path)

    assert 1 == done.rollouts + done.lost.get("traces without a model call: left out", 0)


def test_path_that_no_system_takes_is_refused(tmp_path: Path, imports: Imports) -> None:
    given = trajectory()
    given["steps"][3]["observation"]["results"][0]["subagent_trajectory_ref"] = [{"trajectory_path": "a\0b"}]

    with pytest.raises(DatasetError, match="outside of its folder; nothing was imported"):
        imports(write_lines(tmp_path / "a.json", [given]))


def test_damage_in_the_last_file_leaves_the_first_one_out_too(tmp_path: Path, imports: Imports) -> None:
    whole = write_lines(tmp_path / "a.jsonl", [chat("a", "b")])
    cut = write_lines(tmp_path / "b.jsonl", [chat("c", "d"), chat("e", "f")])
    cut.write_bytes(cut.read_bytes()[:-10])

    with pytest.raises(DatasetError, match=r"b.jsonl, line 2 is not JSON .*the file may be cut"):
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
    said = invoke_agl("data", "import", "a.jsonl", "--dry-run", folder=tmp_path)

    assert said.startswith(
        "would import 1 run into 'imported' from 1 file of chat: 1 model call, 1 task, 0 new rewards\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_import_that_is_killed_is_completed_by_repeating_it(tmp_path: Path, imports: Imports) -> None:
    path = write_lines(tmp_path / "a.jsonl", (chat(f"What is {n} + 1?", str(n + 1) * 50) for n in range(6000)))
    words = [sys.executable, "-m", "agl", "data", "import", str(path), "--experiment", "old", "--store", imports.url]
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
from agl_inspect.terminal.program import main
try:
    main()
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""


@pytest.mark.long
def test_large_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    words = "lorem ipsum dolor sit amet " * 400
    write_lines(tmp_path / "small.jsonl", [chat("a", "b")])
    large = write_lines(tmp_path / "large.jsonl", (chat(f"{n} {words}", words[::-1]) for n in range(2600)))
    assert large.stat().st_size > 50 << 20

    def peak(name: str) -> int:
        command = [sys.executable, "-c", MEASURE, "data", "import", name, "--store", f"sqlite:///{name}.db"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return int(done.stderr.split()[-1])

    assert peak("large.jsonl") < peak("small.jsonl") + 150
