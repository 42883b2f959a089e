"""Imports runs that other tools recorded, as rollouts."""

__all__: list[str] = []
