"""agl_export: writes recorded runs in the formats of other trainers and tools; its plugin adds to ``agl export``."""

__all__: list[str] = []
