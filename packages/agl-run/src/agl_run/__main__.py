"""``python -m agl_run``, for environments whose path lacks the ``agl`` script."""

from agl_inspect.terminal.program import main

main()
