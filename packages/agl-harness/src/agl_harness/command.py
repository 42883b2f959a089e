"""``agl harness``: lists, installs, checks and runs coding harnesses."""

from collections.abc import Sequence
from pathlib import Path

import click

from agl_harness.installing import Program, install, locate, version_of
from agl_harness.table import Harness, find, load_table
from agl_run.commands import json_option, print_json, print_table, visible


@click.group()
def harness() -> None:
    """List, install, check and run coding harnesses: Claude Code, Codex, OpenCode, pi and others.

    NAME is one that `agl harness list` shows, or a TOML file that describes a harness of your own.
    """


@harness.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the harnesses, what is installed of them, and when each was tried."""
    found = [(entry, locate(entry)) for entry in load_table().values()]
    if as_json:
        print_json([_as_json(entry, program) for entry, program in found])
        return
    print_table(("NAME", "VERSION", "INSTALLED", "API", "TRIED", "PASSED"), [_row(*item) for item in found])


@harness.command("install")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def install_(names: Sequence[str]) -> None:
    """Install harnesses from npm or PyPI, each into a folder of its own."""
    for name in names:
        entry = find(name, folder=Path())
        program = install(entry)
        click.echo(visible(f"{entry.label} {version_of(program, entry)}: {program.path}"))


def _row(entry: Harness, program: Program | None) -> tuple[str, ...]:
    tried = entry.checked
    return (
        entry.name,
        entry.pin,
        _installed(entry, program),
        entry.dialect,
        f"{tried.version}, {tried.on}" if tried else "never",
        ", ".join(tried.passed) if tried else "",
    )


def _installed(entry: Harness, program: Program | None) -> str:
    if program is None:
        return "no"
    return (entry.pin or "yes") if program.is_ours else program.path


def _as_json(entry: Harness, program: Program | None) -> dict[str, object]:
    return {
        "name": entry.name,
        "title": entry.title,
        "version": entry.pin,
        "package": entry.npm or " ".join(entry.pip),
        "dialect": entry.dialect,
        "program": None if program is None else program.path,
        "checked": entry.checked,
    }
