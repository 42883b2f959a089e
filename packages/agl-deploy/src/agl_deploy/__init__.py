"""agl_deploy: the plugin with the command ``agl deploy``, which writes the files that deploy an experiment."""

__all__: list[str] = []
