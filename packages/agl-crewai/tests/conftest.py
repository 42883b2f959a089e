"""Runs rollouts for the adapter's tests, whose calls are recorded in the process or by the gateway."""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from agl.tracing import WireTracer
from agl_crewai.tracer import CrewAITracer
from agl_testing.model_server import ScriptedModelServer
from tests.adapters import Played, play

Play = Callable[[Any, Sequence[Any]], list[Played]]

os.environ.update(CrewAITracer().worker_env())  # as a session does it, before the agents import CrewAI

with warnings.catch_warnings():  # CrewAI, and the older OpenTelemetry that it may need, warn of themselves
    warnings.simplefilter("ignore")
    import crewai  # noqa: F401

    from agl.tracing import OtelTracer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings about HTTP clients that CrewAI never closes."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


def tracers() -> list[Any]:
    """Return the tracers in the order in which a session installs them."""
    return [CrewAITracer(), OtelTracer(), WireTracer()]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, value in CrewAITracer().worker_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path_factory.mktemp("crewai")))


@pytest.fixture(params=["wire", "gateway"])
def run(request: pytest.FixtureRequest, model_server: ScriptedModelServer) -> Play:
    """Return a function that runs an agent on several tasks at once, and returns what was recorded."""
    gateway: Any = None
    if request.param == "gateway":
        gateway = pytest.importorskip("agl_gateway.embedded", reason="agl-gateway is not installed").EmbeddedGateway()
    return partial(play, server=model_server, tracers=tracers(), gateway=gateway)
