"""Fixtures for everybody who tests agents, plugins or stores; pytest loads them when agl-testing is installed."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agl_testing.model_server import ScriptedModelServer

pytest.register_assert_rewrite("agl_testing.conformance")


@pytest.fixture
def model_server() -> "Iterator[ScriptedModelServer]":
    """A running scripted model server with an empty script: it says ``ok`` until it is told otherwise."""
    from agl_testing.model_server import ScriptedModelServer  # loads aiohttp, which most test runs do not need

    with ScriptedModelServer() as server:
        yield server
