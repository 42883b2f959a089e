"""agl_archive: writes finished rollouts as Parquet and restores them; a plugin with two commands of ``agl runs``."""

__all__: list[str] = []
