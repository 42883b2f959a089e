"""Recorded runs in the formats of other trainers and tools."""
