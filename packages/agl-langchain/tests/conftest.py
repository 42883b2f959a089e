"""Fixtures of the adapter's tests."""

import gc
import warnings
from collections.abc import Iterator

import pytest

from agl_langchain.tracer import LangChainTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import Script


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings that two habits of LangChain cause.

    LangChain leaves its HTTP clients to the garbage collector, so their sockets are never closed explicitly. It also
    silences pydantic's warnings about tools for a moment, for all threads at once; if two threads make tools at the
    same
    time, one of them may still warn.
    """
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"))


@pytest.fixture(scope="session", autouse=True)
def collected() -> Iterator[None]:
    """Collect garbage after the last test, so that the warnings about unclosed sockets are ignored here."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    """Start a scripted model that calls the tools that requests offer."""
    with ScriptedModelServer(respond=Script()) as running:
        yield running


@pytest.fixture
def tracer() -> LangChainTracer:
    return LangChainTracer()
