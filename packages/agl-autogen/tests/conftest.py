"""Runs rollouts for the adapter's tests, whose calls are recorded in the process or by the gateway."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from agl.tracing import OtelTracer, WireTracer
from agl_autogen.tracer import AutoGenTracer
from agl_testing.model_server import ScriptedModelServer
from tests.adapters import Played, play

Play = Callable[[Any, Sequence[Any]], list[Played]]


def tracers() -> list[Any]:
    """Return the tracers in the order in which a session installs them."""
    return [AutoGenTracer(), OtelTracer(), WireTracer()]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AutoGenTracer().worker_env().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["wire", "gateway"])
def run(request: pytest.FixtureRequest, model_server: ScriptedModelServer) -> Play:
    """Return a function that runs an agent on several tasks at once, and returns what was recorded."""
    gateway: Any = None
    if request.param == "gateway":
        gateway = pytest.importorskip("agl_gateway.embedded", reason="agl-gateway is not installed").EmbeddedGateway()
    return partial(play, server=model_server, tracers=tracers(), gateway=gateway)
