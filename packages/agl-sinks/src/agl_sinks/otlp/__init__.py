"""Recorded rollouts as OpenTelemetry traces, for any tracing backend that takes OTLP over HTTP."""

__all__: list[str] = []
