"""Fixtures of the adapter's tests."""

import gc
import warnings
from collections.abc import Iterator

import pytest

from agl_langchain.tracer import LangChainTracer
from agl_testing.model_server import ScriptedModelServer

from .rollouts import Script


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let two habits of LangChain pass.

    It leaves its HTTP clients to the garbage collector, so their sockets close unannounced. And it silences warnings
    of pydantic about tools for a moment, for all threads at once, so that of two threads that make tools one may
    still warn.
    """
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"))


@pytest.fixture(scope="session", autouse=True)
def collected() -> Iterator[None]:
    """Collect garbage after the last test too, so that its warnings are ignored here."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    """Start a scripted model that uses the tools it is offered."""
    with ScriptedModelServer(respond=Script()) as running:
        yield running


@pytest.fixture
def tracer() -> LangChainTracer:
    return LangChainTracer()
