"""Experiments of agl in Weights & Biases."""

__all__: list[str] = []
