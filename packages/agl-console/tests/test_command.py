"""``agl console``: serving, views as JSON, and runs as one file."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

import agl
from agl_run import Quiet
from agl_testing.commands import invoke_agl


async def solve(task: dict[str, float]) -> float:
    return task["n"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a real run in a folder's ``runs/agl.db``, and return the folder."""
    folder = tmp_path_factory.mktemp("recorded")
    store = f"sqlite:///{folder}/runs/agl.db"
    trainer = agl.Trainer(name="halves", store=store, folder=folder, progress=Quiet())
    trainer.fit(solve, val_dataset=[{"n": 0.0}, {"n": 1.0}])
    return folder


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "agl", "console", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_console_serves_the_only_store_on_a_free_port_until_an_interrupt(
    recorded: Path, number: signal.Signals
) -> None:
    with serving(recorded) as (process, said):
        match = re.fullmatch(r"console at (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)\n", said)
        assert match is not None, said
        with urlopen(match[1]) as answer:
            page = answer.read()
        assert b"halves" in page
        assert b"runs/agl.db</span>" in page
        process.send_signal(number)
        assert 0 == process.wait(60)


@pytest.mark.long
def test_view_is_printed_as_json(recorded: Path) -> None:
    (run,) = json.loads(invoke_agl("console", "--json", "/", folder=recorded))["runs"]
    found = json.loads(invoke_agl("console", "runs/agl.db", "--json", "/rollouts?low=0.5", folder=recorded))
    assert ("halves", "finished") == (run["name"], run["status"])
    assert ["halves-1-validate-val-00000-00001-000"] == [row["rollout_id"] for row in found["rollouts"]]


@pytest.mark.long
def test_store_may_be_named_as_other_commands_name_it(recorded: Path, tmp_path: Path) -> None:
    path = str(recorded / "runs/agl.db")
    (run,) = json.loads(invoke_agl("console", "--store", path, "--json", "/", folder=tmp_path))["runs"]
    assert "halves" == run["name"]
    invoke_agl("console", "--store", path, "export", "halves", folder=tmp_path)
    assert (tmp_path / "halves.html").is_file()
    with pytest.raises(AssertionError, match="name two stores; give one"):
        invoke_agl("console", path, "--store", path, folder=tmp_path)


@pytest.mark.long
def test_store_behind_a_gateway_has_the_same_views(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "an-admin-token-of-the-tests")
    command = [sys.executable, "-m", "agl", "serve", "--store", "sqlite:///runs/agl.db", "--port", "0"]
    with subprocess.Popen(command, cwd=recorded, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())
        assert url is not None
        of_run = ("/runs/halves", "/runs/halves/agents")
        for address in ("/", *of_run, "/rollouts?low=0.5", "/rollouts/latest", "/versions"):
            here = invoke_agl("console", "runs/agl.db", "--json", address, folder=recorded)
            assert here == invoke_agl("console", url[0], "--json", address, folder=recorded)
        process.terminate()


@pytest.mark.long
def test_store_in_the_memory_of_a_running_server_has_its_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "an-admin-token-of-the-tests")
    command = [sys.executable, "-m", "agl", "serve", "--store", "memory://", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())
        assert url is not None
        trainer = agl.Trainer(name="halves", store=url[0], folder=tmp_path, gateway="none", progress=Quiet())
        trainer.fit(solve, val_dataset=[{"n": 0.0}, {"n": 1.0}])
        (run,) = json.loads(invoke_agl("console", url[0], "--json", "/", folder=tmp_path))["runs"]
        newest = json.loads(invoke_agl("console", url[0], "--json", "/rollouts/latest", folder=tmp_path))
        process.terminate()
    assert ("halves", "finished", 2) == (run["name"], run["status"], run["rollouts"])
    assert newest["rollout_id"].startswith("halves-1-validate-val-")


def test_run_is_exported_as_one_file_that_refers_to_nothing(recorded: Path) -> None:
    assert "halves in other.html\n" == invoke_agl(
        "console", "export", "halves", "--output", "other.html", folder=recorded
    )
    assert "halves in halves.html\n" == invoke_agl("console", "runs/agl.db", "export", "halves", folder=recorded)
    page = (recorded / "halves.html").read_text(encoding="utf-8")
    assert "validate" in page
    assert not re.search(r"<(a|img|link)\s|\ssrc=|\shref=", page)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("export", "other"), "unknown run 'other'; agl console --json / lists those of the store"),
        (("export", "halves", "--output", "missing/run.html"), "pass another --output"),
        (("nothing.db",), "there is no store 'nothing.db'"),
        (("--json", "/rollouts?step=x"), "wrong parameter"),
        (("--token-file", "token"), "add --actions"),
        (("--json", "/", "--port", "8000", "--actions"), "--port, --actions"),
        (("--tokenizer", "model", "export", "halves"), "--tokenizer"),
        (("--actions", "--token-file", "runs"), "choose another with --token-file"),
        (("--host", "0.0.0.0"), "set AGL_CONSOLE_PASSWORD"),
    ],
)
def test_mistake_is_answered_with_what_to_do(recorded: Path, words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(AssertionError) as refused:
        invoke_agl("console", *words, folder=recorded)
    assert expected in str(refused.value)
    assert "Traceback" not in str(refused.value)


@pytest.mark.long
def test_port_that_is_taken_is_named(recorded: Path) -> None:
    with serving(recorded) as (_, said):
        port = said.partition("127.0.0.1:")[2].partition("/")[0]
        with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1 port {port}"):
            invoke_agl("console", "--port", port, folder=recorded)


@pytest.mark.long
def test_console_with_actions_names_the_place_of_its_token_and_logs_who_signs_in(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "agl", "console", "--actions", "--token-file", str(tmp_path / "token")]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, cwd=recorded, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().split()[2]
        said = process.stdout.readline()
        assert f"to act, sign in at {address}sign-in with the admin token in {tmp_path / 'token'}\n" == said
        token = (tmp_path / "token").read_text().strip()
        body = urlencode({"token": token, "next": "/versions"}).encode()
        with urlopen(Request(f"{address}sign-in", data=body, headers={"Origin": address.rstrip("/")})) as answer:
            assert f"{address}versions" == answer.url
        process.terminate()
        assert 0 == process.wait(60)
    assert re.fullmatch(r"\S+Z somebody signed in from 127\.0\.0\.1\n", log.read_text())
    assert token not in log.read_text() + said
