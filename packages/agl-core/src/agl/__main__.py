"""``python -m agl`` is the ``agl`` command of ``agl-run``."""

from importlib import import_module

try:
    command = import_module("agl_run.cli.main")
except ModuleNotFoundError as error:
    if error.name != "agl_run":
        raise
    raise SystemExit("the agl command is in the distribution agl-run; run: pip install agl-run") from None

command.main()
