"""Fixtures for everybody who tests agents, plugins or stores; pytest loads them when agl-testing is installed."""

from collections.abc import Iterator

import pytest

from agl_testing.model_server import ScriptedModelServer


@pytest.fixture
def model_server() -> Iterator[ScriptedModelServer]:
    """A running scripted model server with an empty script: it says ``ok`` until it is told otherwise."""
    with ScriptedModelServer() as server:
        yield server
