"""``python -m agl`` is the ``agl`` command."""

from agl.cli.main import main

main()
