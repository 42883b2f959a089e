"""A plugin's store that was written for an older contract is refused when it is opened."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import agl
from agl.errors import PluginError
from agl.stores import MemoryStore
from agl_inspect.stores import build_store
from agl_inspect.terminal.program import cli
from agl_run import Quiet
from agl_testing.plugins import PluginFolder

OLD = """
import agl
from agl.contracts import StoreEntry
from agl.stores import MemoryStore


class OldStore:
    'Has what the contract had before its new queries.'

    def __init__(self, url):
        self._new = MemoryStore()

    def __getattr__(self, name):
        if name in ("count_rollouts", "announce"):
            raise AttributeError(name)
        return getattr(self._new, name)


@agl.hookimpl
def agl_stores():
    yield StoreEntry(name="old", factory=OldStore)
"""
LACKS = "the store 'old' of the plugin 'old' (agl-old 0.9) lacks count_rollouts, announce, which"


def solve(task: Any) -> float:
    return 1.0


@pytest.fixture
def old(agl_plugins: PluginFolder) -> None:
    agl_plugins.install(OLD, name="old", version="0.9")


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    "words", [("runs",), ("show", "latest"), ("exec", "--", "true"), ("serve", "--port", "0")], ids=" ".join
)
def test_command_refuses_a_store_that_lacks_a_part_of_the_contract(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0] == "serve":
        pytest.importorskip("agl_gateway")
    done = CliRunner().invoke(cli, [words[0], "--store", "old://anywhere", *words[1:]])
    assert (1, True) == (done.exit_code, done.stderr.startswith(f"Error: {LACKS}")), done.stderr


@pytest.mark.usefixtures("old")
def test_run_refuses_a_store_that_lacks_a_part_of_the_contract(tmp_path: Path) -> None:
    trainer = agl.Trainer(store="old://anywhere", folder=tmp_path, progress=Quiet())
    with pytest.raises(PluginError) as refused:
        trainer.fit(solve, val_dataset=[1])
    assert str(refused.value).startswith(LACKS)


def test_run_refuses_a_store_object_that_lacks_a_part_of_the_contract(tmp_path: Path) -> None:
    class Half:
        async def close(self) -> None: ...

    trainer = agl.Trainer(store=Half(), folder=tmp_path, progress=Quiet())  # pyright: ignore[reportArgumentType]  # the mistake
    with pytest.raises(PluginError, match="the store 'Half' lacks enqueue, "):
        trainer.fit(solve, val_dataset=[1])


def test_stores_that_come_with_agl_have_the_whole_contract(tmp_path: Path) -> None:
    pytest.importorskip("agl_gateway")
    manager = agl.PluginManager.from_environment()
    for url in ("memory://", f"sqlite:///{tmp_path}/runs.db", "http://a-token@127.0.0.1:9"):
        store = build_store(manager, url)
        assert isinstance(store, MemoryStore) == url.startswith("memory")
