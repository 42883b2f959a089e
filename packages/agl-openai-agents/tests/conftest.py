"""Fixtures of the adapter's tests."""

import gc
import warnings
from collections.abc import Iterator

import pytest

from agl_openai_agents.tracer import OpenAIAgentsTracer
from agl_testing.model_server import ScriptedModelServer

from .rollouts import Script


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore unclosed sockets: these programs leave their HTTP clients to the garbage collector."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


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
def tracer() -> OpenAIAgentsTracer:
    return OpenAIAgentsTracer()
