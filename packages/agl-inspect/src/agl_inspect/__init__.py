"""agl_inspect: reads what agl recorded, as a library with typed results and as commands.

Every module but those of :mod:`agl_inspect.cli` is public. A name with a leading underscore is private.
"""
