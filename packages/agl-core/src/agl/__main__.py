"""``python -m agl`` is the ``agl`` command of ``agl-run``."""

from importlib import import_module

from agl.hints import pip_install

try:
    command = import_module("agl_run.cli.main")
except ModuleNotFoundError as error:
    if error.name != "agl_run":
        raise
    raise SystemExit(f"the agl command is in the distribution agl-run; run: {pip_install('agl-run')}") from None

command.main()
