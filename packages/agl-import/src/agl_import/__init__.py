"""agl_import: imports the runs of other tools as rollouts; a plugin that offers the command ``agl import``."""

__all__: list[str] = []
