"""The ``agl`` command. All commands come from plugins, agl-run's own included, and load when they are called."""
