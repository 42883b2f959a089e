"""``agl harness run`` and ``agl harness doctor``, with a harness made for these tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from agl_harness import examination, find
from agl_testing.model_server import ScriptedModelServer
from agl_testing.waiting import wait_until

from .conftest import asks


def agl(project: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run ``agl harness`` in the project's folder."""
    command = [sys.executable, "-m", "agl_run", "harness", *words]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def test_one_run_is_recorded_in_a_copy_of_a_folder(project: Path, model: ScriptedModelServer) -> None:
    model.enqueue(*asks("ls; echo new > calc.py"))
    words = ["run", "--workspace", "repos/add", "--model", "scripted", "--upstream", model.base_url]
    done = agl(project, *words, "shell.toml", "--look around")

    assert (0, "Done.\n") == (done.returncode, done.stdout), done.stderr
    assert "recorded 2 model calls" in done.stderr
    assert "--look around" == model.calls[0].json["messages"][0]["content"]
    assert "calc.py\n" == model.calls[-1].json["messages"][-1]["content"]
    (worked_in,) = [line.split(" in ", 1)[1] for line in done.stderr.splitlines() if "shell works in" in line]
    assert "new\n" == (Path(worked_in) / "calc.py").read_text()
    assert "a - b" in (project / "repos" / "add" / "calc.py").read_text()


def test_run_without_a_model_s_address_says_what_to_set(project: Path) -> None:
    done = agl(project, "run", "--model", "scripted", "--upstream", "", "shell.toml", "do it")
    assert 1 == done.returncode
    assert "--upstream http://HOST:PORT/v1" in done.stderr


@pytest.mark.long
def test_doctor_gives_a_harness_a_task_and_names_one_that_fails(project: Path) -> None:
    (project / "broken.toml").write_text('[broken]\ncommand = ["sh", "-c", "echo no model >&2; exit 3", "$prompt"]\n')
    done = agl(project, "doctor", "shell.toml", "broken.toml")
    assert 1 == done.returncode
    assert "shell" in done.stdout
    assert ": works" in done.stdout.splitlines()[0]
    assert "did not come back (exit status 3): no model" in done.stdout
    assert "sandbox: " in done.stdout
    assert 0 == agl(project, "doctor", "shell.toml").returncode


@pytest.mark.long
def test_doctor_ends_a_harness_that_does_not_answer(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "slow.toml").write_text(
        '[slow]\ncommand = ["sh", "-c", "echo $$$$ > $folder/pid; sleep 600", "$prompt"]\n'
    )
    monkeypatch.setattr(examination, "_TURN_S", 15.0)  # time for a busy machine to start the harness
    monkeypatch.chdir(project)
    found = examination.examine(find("slow.toml", folder=project), given="slow.toml")
    assert "it did not answer a task within 15 s" == found.problem
    wait_until(lambda: not Path("/proc", (project / "pid").read_text().strip()).exists())
