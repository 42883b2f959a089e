"""Finished rollouts as Parquet files, on a disk or in an object store, and back."""

__all__: list[str] = []
