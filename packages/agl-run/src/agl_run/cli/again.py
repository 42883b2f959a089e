"""Renders the command that runs an experiment file again as it was given: its overrides and the options in use."""

from pathlib import Path

import click

from agl_inspect.stores import command

_OF_AGL = ("debug", "no_plugins")
_FLAGS = ("quiet", "as_json", "has_console")
_NAMES = {"as_json": "--json", "has_console": "--console"}


def run_again(file: Path, settings: tuple[str, ...], *flags: str) -> str:
    """Return ``agl run FILE`` with ``--set`` and the flags of the current command, and ``flags`` besides."""
    context = click.get_current_context()
    before = _given(context.find_root(), _OF_AGL)
    overrides = [word for setting in settings for word in ("--set", setting)]
    return command(*before, "run", str(file), *overrides, *_given(context, _FLAGS), *flags)


def _given(context: click.Context, names: tuple[str, ...]) -> list[str]:
    return [_NAMES.get(name, f"--{name.replace('_', '-')}") for name in names if context.params.get(name)]
