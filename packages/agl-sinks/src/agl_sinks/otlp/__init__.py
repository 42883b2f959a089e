"""Sends recorded rollouts as OpenTelemetry traces to any tracing backend that accepts OTLP over HTTP."""

__all__: list[str] = []
