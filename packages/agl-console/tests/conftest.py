"""Stores with recorded runs, and a console over them."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from agl.contracts import Store
from agl_console.server import make_app
from agl_store_sqlite._store import SQLiteStore

from .records import fill

TEST_LIMIT_S = 240.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each coroutine test in a new event loop, with a time limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), TEST_LIMIT_S))
    return True


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in another thread, since Playwright keeps an event loop in the test's thread."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the runs of :func:`records.fill` into a SQLite file, which all tests of a module share."""
    path = tmp_path_factory.mktemp("store") / "runs.db"

    async def write() -> None:
        store = SQLiteStore(f"sqlite:///{path}")
        await fill(store)
        await store.close()

    run_apart(write())
    return path


Open = Callable[..., AbstractAsyncContextManager[TestClient]]


@pytest.fixture
def opened(filled: Path) -> Open:
    """Return a function that opens a console over the filled store, or over another one."""

    @asynccontextmanager
    async def use(store: Store | None = None, *, password: str = "", **given: Any) -> AsyncIterator[TestClient]:
        own = store or SQLiteStore(f"sqlite:///{filled}")
        app = make_app(own, name="sqlite:///runs.db", hosts=("console.example",), password=password, **given)
        async with TestClient(TestServer(app)) as client:
            yield client
        if store is None:
            await own.close()

    return use
