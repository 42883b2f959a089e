"""``python -m agl_run``, for where the ``agl`` script is not on the path."""

from agl_run.cli.main import main

main()
