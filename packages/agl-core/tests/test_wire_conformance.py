"""The wire tracer passes the tests that every tracer passes, with each client module that is installed."""

import importlib
import importlib.util
from typing import Any

import pytest

from agl.tracing import WireTracer

pytest.importorskip("agl_testing.conformance", reason="agl-testing is not installed")

from agl_testing.conformance.tracer import Probe, TracerConformance, TracerScenario

MODULES = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
URL = "http://models.example/v1/chat/completions"
CHAT = {"model": "frozen", "messages": [{"role": "user", "content": "hi"}]}


if not MODULES:
    pytest.skip("neither httpx nor httpx2 is installed", allow_module_level=True)


class TestWireTracer(TracerConformance):
    has_current_span = False

    @pytest.fixture(params=MODULES)
    def scenario(self, request: pytest.FixtureRequest) -> TracerScenario:
        http = importlib.import_module(request.param)

        def run(probe: Probe) -> None:
            def answer(_: Any) -> Any:
                probe()
                return http.Response(200, json={"id": "c", "choices": [{"index": 0, "message": {"content": "hi"}}]})

            with http.Client(transport=http.MockTransport(answer)) as client:
                client.post(URL, json=CHAT)

        def fail(error: Exception) -> None:
            def refuse(_: Any) -> Any:
                raise error

            with http.Client(transport=http.MockTransport(refuse)) as client:
                client.post(URL, json=CHAT)

        return TracerScenario(
            tracer=WireTracer(),
            run=run,
            fail=fail,
            patched=((http.Client, "send"), (http.AsyncClient, "send")),
            attempt={"gateway_url": "http://gateway.example"},
        )
