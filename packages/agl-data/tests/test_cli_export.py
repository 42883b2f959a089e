"""``agl data export`` with formats of plugins; a file is written completely or not at all."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import agl
from agl import PluginManager
from agl.contracts import CommandEntry
from agl.errors import ConfigError
from agl.schemas import Outcome, Reward, Rollout
from agl.stores import TableStore
from agl.tracing import make_reward_span
from agl_data.export.target import target_of
from agl_inspect.exports import Exported, ExportSetup, Losses, call_of_record, reward_of_record
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore


class Names:
    """Writes the ids and rewards of rollouts; refuses the task ``broken``."""

    reads_blobs = False

    def __init__(self, *, setup: ExportSetup) -> None:
        self._setup = setup

    def write(self, item: Exported) -> int:
        rollout_id = item.recording.rollout.rollout_id
        self._setup.file.write(f"{rollout_id} {item.episode.reward}\n".encode())
        self._setup.losses.add("tasks: left out", rollout_id)
        if item.recording.rollout.task == "broken":
            raise ConfigError("a broken task")
        return 1

    def close(self) -> None:
        self._setup.file.write(f"end of {self._setup.path}\n".encode())


class Plugin:
    @agl.hookimpl
    def agl_commands(self) -> Iterator[CommandEntry]:
        yield CommandEntry(name="names", parent="export", factory=Names, summary="the ids of rollouts")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    manager = PluginManager.from_environment()
    manager.register(Plugin(), name="names")

    def invoke(*words: str) -> Result:
        return CliRunner().invoke(cli, [*words], obj=manager)

    return invoke


async def _record(store: TableStore, number: int, task: Any) -> None:
    own = f"ro-{number}"
    await store.enqueue([Rollout(rollout_id=own, task=task, experiment="sums")])
    (claim,) = await store.claim(worker="w")
    span = make_reward_span(own, claim.attempt.attempt_id, Reward(value=float(number)))
    await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=(span,))])


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., None]:
    """A function that fills ``runs/runs.db`` with one rollout for each task, with the rewards 0, 1, 2 and so on."""
    import asyncio

    async def fill(tasks: tuple[Any, ...]) -> None:
        (tmp_path / "runs").mkdir()
        found = SQLiteStore(f"sqlite:///{tmp_path}/runs/runs.db")
        for number, task in enumerate(tasks):
            await _record(found, number, task)
        await found.close()

    return lambda *tasks: asyncio.run(fill(tasks))


def test_format_of_a_plugin_gets_the_rollouts_that_match(run, store, tmp_path):
    store("a", "b", "c")
    result = run("data", "export", "--format", "names", "--min-reward", "1", "--output", "out.txt")

    assert (0, "ro-1 1.0\nro-2 2.0\nend of out.txt\n") == (result.exit_code, (tmp_path / "out.txt").read_text())
    assert "what names does not hold:\n  2  tasks: left out\n2 records of names written to out.txt\n" == result.stderr
    losses = json.loads((tmp_path / "out.txt.losses.json").read_text())
    assert {"losses": [{"what": "tasks: left out", "count": 2, "rollouts": ["ro-1", "ro-2"]}]} == losses
    assert ["out.txt", "out.txt.losses.json", "runs"] == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize("output", [(), ("--output", "-")])
def test_format_of_a_plugin_is_written_to_standard_output(run, store, output, tmp_path):
    store("a")
    result = run("data", "export", "ro-0", "--format", "names", *output)
    assert "ro-0 0.0\nend of None\n" == result.stdout
    assert result.stderr.endswith("1 record of names written to stdout\n")
    assert ["runs"] == os.listdir(tmp_path)


def test_export_that_fails_leaves_the_earlier_file(run, store, tmp_path):
    store("a", "broken")
    (tmp_path / "out.txt").write_text("earlier")
    result = run("data", "export", "--format", "names", "--output", "out.txt")
    assert (1, "Error: a broken task\n") == (result.exit_code, result.stderr)
    assert "earlier" == (tmp_path / "out.txt").read_text()
    assert ["out.txt", "runs"] == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize("form", ["rows", "names", "tinker"])
def test_lines_of_json_are_not_written_into_a_file_named_parquet(run, store, tmp_path, form):
    store("a")
    result = run("data", "export", "--format", form, "--output", "rows.parquet")
    assert (1, True) == (result.exit_code, "writes JSON lines, and 'rows.parquet' says Parquet" in result.stderr)
    assert ["runs"] == os.listdir(tmp_path)


def test_help_lists_the_formats_of_plugins(run):
    assert "the ids of rollouts" in run("data", "export", "--help").output


def test_unknown_format_names_those_there_are(run):
    result = run("data", "export", "--format", "csv")
    assert (2, True) == (result.exit_code, "'csv' is not one of 'messages', 'dpo'" in result.stderr)
    assert "'names'" in result.stderr


def test_file_is_not_there_before_it_is_whole_even_after_kill(tmp_path):
    code = (
        "import os, pathlib\n"
        "from agl_data.export.target import target_of\n"
        "with target_of(pathlib.Path('out.jsonl')) as file:\n"
        "    file.write(b'half a'); file.flush(); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=300, check=False)
    assert -signal.SIGKILL == done.returncode
    assert not (tmp_path / "out.jsonl").exists()


def test_file_keeps_its_mode_and_a_link_its_place(tmp_path):
    target, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with target_of(link) as file:
        file.write(b"new")
    assert ("new", True, 0o600) == (target.read_text(), link.is_symlink(), stat.S_IMODE(target.stat().st_mode))


def test_losses_of_an_earlier_export_go_when_nothing_is_lost(tmp_path):
    losses = Losses()
    losses.add("tasks: left out", "ro-1")
    for found in (losses, Losses()):
        with target_of(tmp_path / "out", found) as file:
            file.write(b"x")
        assert (tmp_path / "out.losses.json").exists() == bool(found.listed())


def test_losses_of_a_plugins_format_go_with_its_file(run, store, tmp_path):
    store("a")
    for form, is_there in (("names", True), ("messages", False)):
        assert 0 == run("data", "export", "--format", form, "--output", "out.txt").exit_code
        assert (tmp_path / "out.txt.losses.json").exists() == is_there


def test_pipe_gets_what_is_written(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    with target_of(pipe, Losses()) as file:
        file.write(b"through")
    reader.join(60)
    assert [b"through"] == found
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("record", [{}, {"request_id": 1}, "text", {"prompt_token_ids": ["a"]}, None])
def test_record_of_another_shape_is_no_call(record):
    whole = {"request_id": "r", "dialect": "chat", "model": "m"}
    given = {**whole, **record} if isinstance(record, dict) and record else record
    with pytest.raises(ValueError, match="it is not a record of a model call"):
        call_of_record(given, request=None, response=None)
    with pytest.raises(ValueError, match="it is not a record of a reward"):
        reward_of_record({"value": "high"})
