"""Writes finished rollouts as Parquet files, to a disk or an object store, and restores them."""

__all__: list[str] = []
