"""``agl exec``: any program is recorded once, with its output and exit status passed through."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_testing.model_server import ScriptedModelServer

StartAgl = Callable[..., Any]

PROGRAM = """
import sys, openai
client = openai.OpenAI({where} max_retries=0)
text = client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "what is 4?"}}])
print(text.choices[0].message.content)
sys.exit(3)
"""


def record(agl: StartAgl, folder: Path, *words: str) -> tuple[int, str, str]:
    process = agl("exec", *words, cwd=folder)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("how", ["upstream", "upstream and a URL of its own", "a URL of its own"])
def test_program_is_recorded_whichever_way_it_finds_its_model(
    agl: StartAgl, tmp_path: Path, server: ScriptedModelServer, how: str
) -> None:
    where = f"base_url={server.base_url!r}," if "URL" in how else ""
    upstream = ("--upstream", server.base_url) if "upstream" in how else ()

    code, out, err = record(agl, tmp_path, *upstream, "--", sys.executable, "-c", PROGRAM.format(where=where))

    assert (3, "4\n") == (code, out)
    assert "agl: recorded 1 model calls" in err, err
    shown = agl("show", "latest", "--json", "--store", "sqlite:///runs/agl.db", cwd=tmp_path)
    text, _ = shown.communicate(timeout=60)
    spans = json.loads(text)["spans"]
    assert ["m"] == [span["call"]["model"] for span in spans if span.get("call")]


def latest(agl: StartAgl, folder: Path) -> Any:
    text, _ = agl("show", "latest", "--json", "--store", "sqlite:///runs/agl.db", cwd=folder).communicate(timeout=60)
    return json.loads(text)["rollout"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no-such-program-at-all", "cannot start 'no-such-program-at-all': no such program was found; the command"),
        ("./notes.txt", r"cannot start './notes.txt': it may not be executed (chmod +x); the command goes after --"),
        ("./broken", "cannot start './broken': [Errno 8] Exec format error"),
    ],
)
def test_program_that_cannot_start_is_a_readable_error_and_leaves_no_rollout(
    agl: StartAgl, tmp_path: Path, program: str, message: str
) -> None:
    (tmp_path / "notes.txt").write_text("no program")
    (tmp_path / "broken").write_bytes(b"\x7fELF and nothing more")
    (tmp_path / "broken").chmod(0o755)
    record(agl, tmp_path, "--", sys.executable, "-c", "pass")
    before = latest(agl, tmp_path)

    code, _, err = record(agl, tmp_path, "--", program)

    assert 1 == code
    assert message in err
    assert "Traceback" not in err
    assert before == latest(agl, tmp_path)
    listed, _ = agl("runs", "--json", "--store", "sqlite:///runs/agl.db", cwd=tmp_path).communicate(timeout=60)
    assert [before] == [row["rollout"] for row in json.loads(listed)]


def test_program_that_does_not_exist_makes_no_store(agl: StartAgl, tmp_path: Path) -> None:
    record(agl, tmp_path, "--", "no-such-program-at-all")

    assert not (tmp_path / "runs").exists()


def test_program_without_a_call_is_recorded_and_says_what_to_check(agl: StartAgl, tmp_path: Path) -> None:
    code, _, err = record(agl, tmp_path, "--", sys.executable, "-c", "pass")

    assert 0 == code
    assert "no model call was seen" in err


PAST_THE_RECORD = """
import agl
with agl.operation("chat", **{"gen_ai.operation.name": "chat", "agl.client": "pigeon.ChatPigeon"}):
    pass
"""


def test_calls_that_the_programs_framework_saw_and_that_were_not_recorded_are_reported(
    agl: StartAgl, tmp_path: Path
) -> None:
    code, _, err = record(agl, tmp_path, "--", sys.executable, "-c", PAST_THE_RECORD)

    assert 0 == code
    assert (
        "agl: there are 1 model calls that were not recorded, made by pigeon.ChatPigeon (1). "
        "A Python program is recorded where its clients use httpx"
    ) in err
    assert "no model call was seen" not in err
