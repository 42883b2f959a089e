"""Sandboxes: their contract, the local backend, and backends for Harbor and Ray."""
