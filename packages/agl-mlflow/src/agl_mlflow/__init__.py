"""Experiments of agl in MLflow."""

__all__: list[str] = []
