"""``agl data import``, and the commands that read imported runs, as users call them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agl_testing.commands import invoke_agl
from agl_testing.waiting import wait_until

from .logs import chat, claude_session, trajectory, write_lines


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """A folder whose store has an imported session of Claude Code."""
    claude_session(tmp_path / "logs" / "session.jsonl")
    invoke_agl("data", "import", "logs", folder=tmp_path)
    return tmp_path


def test_report_says_what_arrived_and_what_did_not(tmp_path: Path) -> None:
    claude_session(tmp_path / "logs" / "session.jsonl")
    said = invoke_agl("data", "import", "logs", folder=tmp_path)

    for line in (
        "imported 1 run into 'imported' from 1 file of claude-code: 4 model calls, 1 task, 0 new rewards\n",
        "what does not arrive, or not whole:\n",
        "  4  calls without their system prompt and tools, which the log leaves out\n",
        "  4  calls without token ids: they feed sft and dpo (agl data export writes their data), prompts and rewards",
        "look with: agl runs --experiment imported\n",
    ):
        assert line in said


def test_show_prints_the_tree_of_an_imported_session(sessions: Path) -> None:
    shown = invoke_agl("show", "latest", folder=sessions)

    for part in ("invoke_agent claude-code", "execute_tool Bash", "invoke_agent Explore", "user: Mend the tests"):
        assert part in shown


def test_why_says_what_calls_without_token_ids_can_feed(sessions: Path) -> None:
    said = invoke_agl("why", "latest", folder=sessions)

    assert "4 calls recorded without token ids, none rejected" in said
    assert (
        "Text feeds sft and dpo (agl data export writes their data), prompt search and rewards, not grpo or another"
        in said
    )


def test_export_writes_a_dialogue_for_each_conversation(sessions: Path) -> None:
    lines = [
        json.loads(line)
        for line in invoke_agl("data", "export", "latest", folder=sessions).splitlines()
        if line[0] == "{"
    ]

    assert ["Explore", "claude-code"] == sorted(line["agent"] for line in lines)
    main = next(line for line in lines if line["agent"] == "claude-code")
    assert "Done." == main["messages"][-1]["content"]


def test_calls_with_token_ids_become_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [trajectory()])
    invoke_agl("data", "import", "a.jsonl", folder=tmp_path)
    (row,) = [
        json.loads(line)
        for line in invoke_agl("data", "export", "--format", "rows", folder=tmp_path).splitlines()
        if line
    ]

    assert ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1]) == (row["ids"], row["mask"])


def test_json_has_the_counts(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [chat("a", "b", score=1)])
    done = json.loads(invoke_agl("data", "import", "a.jsonl", "--reward", "score", "--json", folder=tmp_path))

    assert (1, 0, 1, 1, {"chat": 1}) == (done["rollouts"], done["known"], done["calls"], done["rewards"], done["files"])


def test_text_that_a_terminal_obeys_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [chat("a", "b", agent="[bold]\x1b[31mred", **{"\x1b]0;x": 1})])
    said = invoke_agl("data", "import", "a.jsonl", folder=tmp_path)

    assert "\x1b" not in said
    assert "agents: [bold]\\x1b[31mred (1)" in said


def test_two_imports_of_one_file_at_once_add_its_runs_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", (chat(f"{n}", "b" * 100) for n in range(1000)))
    words = [sys.executable, "-m", "agl", "data", "import", "a.jsonl", "--json"]
    both = [subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(2)]

    assert [0, 0] == [process.wait(120) for process in both]
    assert 1000 == len(json.loads(invoke_agl("runs", "--json", "--limit", "5000", folder=tmp_path)))


def test_interrupt_says_how_to_complete_the_import(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", (chat(f"{n}", "b" * 100) for n in range(20_000)))
    words = [sys.executable, "-m", "agl", "data", "import", "a.jsonl"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (tmp_path / "runs" / "agl.db").exists(), within_s=120)
        os.kill(process.pid, signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()

    assert 130 == process.returncode
    assert said.endswith("stopped; what is in the store stays, and the same command adds the rest\n")
    assert "Traceback" not in said
