"""The OpenTelemetry tracer passes the tests that every tracer passes."""

import pytest
from opentelemetry import trace

from agl.tracing import OtelTracer

pytest.importorskip("agl_testing.conformance", reason="agl-testing is not installed")

from agl_testing.conformance.tracer import Probe, TracerConformance, TracerScenario


def two_nodes(probe: Probe) -> None:
    tracer = trace.get_tracer("some.framework")
    with tracer.start_as_current_span("invoke_agent"), tracer.start_as_current_span("execute_tool"):
        probe()


def node_that_raises(error: Exception) -> None:
    with trace.get_tracer("some.framework").start_as_current_span("execute_tool"):
        raise error


class TestOtelTracer(TracerConformance):
    @pytest.fixture
    def scenario(self) -> TracerScenario:
        return TracerScenario(tracer=OtelTracer(), run=two_nodes, fail=node_that_raises)
