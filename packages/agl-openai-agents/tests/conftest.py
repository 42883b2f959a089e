"""Fixtures of the adapter's tests."""

import gc
import warnings
from collections.abc import Iterator

import pytest

from agl_openai_agents.tracer import OpenAIAgentsTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import Script


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings about unclosed sockets, since these programs never close their HTTP clients."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


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
def tracer() -> OpenAIAgentsTracer:
    return OpenAIAgentsTracer()
