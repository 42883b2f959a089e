"""``python -m agl_run``, for environments whose path lacks the ``agl`` script."""

from agl_run.cli.main import main

main()
