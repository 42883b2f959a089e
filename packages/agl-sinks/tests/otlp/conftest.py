"""A tracing backend and a model API, on real ports."""

import threading
from collections.abc import Iterator

import pytest

from agl_testing.model_server import ScriptedModelServer

from .backends import Backend


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.is_open.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def model() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer() as server:
        yield server
