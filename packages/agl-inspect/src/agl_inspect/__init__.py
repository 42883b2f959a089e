"""agl_inspect: reads recorded runs, as a library with typed results and as commands.

Every module except those of :mod:`agl_inspect.cli` is public. A name with a leading underscore is private.
"""
