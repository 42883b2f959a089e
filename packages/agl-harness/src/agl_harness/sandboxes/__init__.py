"""Sandboxes: their contract, the local kind, and backends that make them elsewhere."""
