"""agl_deploy: files that deploy an experiment; a plugin that offers the command ``agl deploy``."""

__all__: list[str] = []
