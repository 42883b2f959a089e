"""``python -m agl`` runs the ``agl`` command, which the distribution ``agl-run`` installs."""

from importlib.metadata import entry_points

from agl.hints import pip_install

found = tuple(entry_points(group="console_scripts", name="agl"))
if not found:
    raise SystemExit(f"the agl command is in the distribution agl-run; run: {pip_install('agl-run')}")
found[0].load()()
