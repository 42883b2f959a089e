"""Fixtures for tests of agents, plugins and stores; pytest loads them automatically once agl-testing is installed."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agl.contracts import Store
    from agl_testing.model_server import ScriptedModelServer
    from agl_testing.plugins import PluginFolder

pytest.register_assert_rewrite("agl_testing.conformance")


@pytest.fixture
def model_server() -> "Iterator[ScriptedModelServer]":
    """A running scripted model server, which answers ``ok`` until the test gives it a script."""
    from agl_testing.model_server import ScriptedModelServer  # loads aiohttp, which most test runs do not need

    with ScriptedModelServer() as server:
        yield server


@pytest.fixture
def agl_plugins(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[PluginFolder]":
    """Installs distributions with plugins, which are removed after the test."""
    from agl_testing.plugins import PluginFolder

    folder = PluginFolder(tmp_path_factory.mktemp("agl-plugins"))
    folder.open()
    yield folder
    folder.close()


@pytest.fixture
def memory_store() -> "Iterator[Store]":
    """An empty memory store, closed after the test."""
    import asyncio

    from agl.stores import MemoryStore

    store = MemoryStore("memory://")
    yield store
    asyncio.run(store.close())


@pytest.fixture
def sqlite_url(tmp_path: "Path") -> str:
    """URL of a SQLite store that does not exist yet."""
    return f"sqlite:///{(tmp_path / 'store.db').as_posix()}"


@pytest.fixture
def make_experiment(tmp_path: "Path") -> "Callable[..., Path]":
    """A function that writes a small experiment and returns its file; see ``agl_testing.experiments``."""
    from functools import partial

    from agl_testing.experiments import write_experiment

    return partial(write_experiment, tmp_path / "experiment")
