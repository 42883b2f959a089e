"""The pytest plugin's smaller fixtures."""

import asyncio
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from agl.contracts import RolloutQuery, Store
from agl_testing.stores.samples import make_rollout


def test_memory_store_is_empty_and_usable(memory_store: Store) -> None:
    async def use() -> int:
        await memory_store.enqueue([make_rollout()])
        return len(await memory_store.rollouts(RolloutQuery()))

    assert 1 == asyncio.run(use())


def test_sqlite_url_names_a_file_that_is_not_there_yet(sqlite_url: str) -> None:
    assert sqlite_url.startswith("sqlite:///")
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


def test_make_experiment_writes_a_whole_folder(make_experiment: Callable[..., Path]) -> None:
    path = make_experiment(base_url="http://127.0.0.1:1/v1", more='[[algorithm]]\nuse = "pick"\n', files={"x.txt": "x"})
    table = tomllib.loads(path.read_text())
    assert ("agent:solve", "openai", "pick") == (
        table["experiment"]["agent"],
        table["policy"]["main_llm"]["use"],
        table["algorithm"][0]["use"],
    )
    tasks = [json.loads(line) for line in (path.parent / "train.jsonl").read_text().splitlines()]
    assert 4 == len(tasks)
    assert "x" == (path.parent / "x.txt").read_text()
    assert "async def solve" in (path.parent / "agent.py").read_text()


def test_pytest_plugin_loads_no_server_and_no_core() -> None:
    code = "import agl_testing.pytest_plugin, sys; print('aiohttp' in sys.modules, 'agl' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "False False" == run.stdout.strip()
