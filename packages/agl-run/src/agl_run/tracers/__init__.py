"""Tracers that are always on."""
