"""agl_inspect: reads what agl recorded, as a library with typed results and as commands.

The public modules are its folders: :mod:`agl_inspect.rollouts`, :mod:`agl_inspect.versions` and so on.
"""
