"""Experiments of agl in TensorBoard."""

__all__: list[str] = []
