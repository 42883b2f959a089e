"""Writes recorded runs in the formats of other trainers and tools."""

__all__: list[str] = []
