"""The ``agl`` command. Its commands come from plugins, the core's own included, and load when they are called."""
