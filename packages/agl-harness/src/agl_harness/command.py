"""``agl harness``: lists, installs, checks and runs coding harnesses."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from agl.errors import ConfigError
from agl_harness.examination import examine
from agl_harness.harbor_tasks.folder import LACKS, Lack
from agl_harness.harbor_tasks.oracle import solve_all
from agl_harness.installation import Program, install, locate, require, version_of
from agl_harness.sandboxes.isolation import find_isolation
from agl_harness.table import SITUATIONS, Harness, find, load_table
from agl_inspect.terminal.opening import manager_of
from agl_inspect.terminal.output import json_option, print_json, print_table
from agl_inspect.text import visible
from agl_run.programs import exec_program


@click.group()
def harness() -> None:
    """List, install, check and run coding harnesses: Claude Code, Codex, OpenCode, pi and others.

    NAME is one that `agl harness list` shows, or a TOML file that describes a harness of your own.
    """


@harness.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the harnesses, their programs, and when each was tried."""
    found = [(entry, locate(entry)) for entry in load_table().values()]
    if as_json:
        print_json([_as_json(entry, program) for entry, program in found])
        return
    print_table(("NAME", "VERSION", "INSTALLED", "API", "TRIED", "PASSED"), [_row(*item) for item in found])


@harness.command("install")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def install_(names: Sequence[str]) -> None:
    """Install harnesses from npm or PyPI.

    Each gets a folder of its own.
    """
    for name in names:
        entry = find(name, folder=Path())
        program = install(entry)
        click.echo(visible(f"{entry.label} {version_of(program, entry)}: {program.path}"))


@harness.command("run", context_settings={"ignore_unknown_options": True})
@click.option("--store", "url", default=None, help="Store for the record.  [sqlite:///runs/agl.db]")
@click.option(
    "--upstream",
    default=None,
    envvar="OPENAI_BASE_URL",
    help="Address for the model calls of the harness.  [$OPENAI_BASE_URL]",
)
@click.option("--model", required=True, help="Name of the model.")
@click.option("--workspace", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder to copy.")
@click.option("--timeout", "timeout_s", type=float, default=None, help="Seconds after which it is stopped.")
@click.argument("name")
@click.argument("task")
@click.pass_context
def run(
    ctx: click.Context,
    url: str | None,
    upstream: str | None,
    model: str,
    workspace: Path | None,
    timeout_s: float | None,
    name: str,
    task: str,
) -> None:
    """Run NAME once on TASK and record its model calls.

    The record is the same as that of agl exec. The harness works in a copy of the folder --workspace, or in an empty
    one, which stays for you to look at.
    """
    entry = find(name, folder=Path())
    require(entry)
    if not upstream:
        raise ConfigError("say where the model is: --upstream http://HOST:PORT/v1, or set OPENAI_BASE_URL")
    folder = Path(tempfile.mkdtemp(prefix=f"agl-{entry.name}-"))
    if workspace is not None:
        shutil.copytree(workspace, folder, symlinks=True, dirs_exist_ok=True)
    click.echo(visible(f"agl: {entry.label} works in {folder}"), err=True)
    words = ("--harness", name, "--folder", str(folder), "--model", model, "--task", task)
    command = (sys.executable, "-m", "agl_harness.launch", *words)
    exec_program(manager_of(ctx), command, url=url, upstream=upstream, timeout_s=timeout_s)


@harness.command("oracle")
@click.option(
    "--without",
    metavar="KIND",
    multiple=True,
    type=click.Choice(LACKS),
    help="What the sandbox need not give; repeatable.",
)
@click.argument("tasks")
@json_option
def oracle(tasks: str, without: Sequence[Lack], as_json: bool) -> None:
    """Run the solutions of Harbor tasks, and print their rewards.

    TASKS is a task folder, a folder of them, or a pattern for them. The exit status is 1 if a reward is below 1.
    """
    verdicts = asyncio.run(solve_all(tasks, without=without))
    if as_json:
        print_json(verdicts)
    else:
        for found in verdicts:
            click.echo(visible(f"{found.name}: {found.problem or f'{found.reward:g}'}"))
    sys.exit(any(found.problem or found.reward < 1 for found in verdicts))


@harness.command("doctor")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@json_option
def doctor(names: Sequence[str], as_json: bool) -> None:
    """Check that harnesses are installed and run.

    Each gets one task, which a scripted model answers. By default all installed harnesses are checked. The exit status
    is 1 if one does not work.
    """
    table = load_table()
    chosen = names or [name for name, entry in table.items() if locate(entry)]
    findings = [examine(find(name, folder=Path()), given=name) for name in chosen]
    isolation = find_isolation("auto")
    if as_json:
        print_json({"sandbox": isolation.warning or "bubblewrap", "harnesses": findings})
    else:
        for found in findings:
            click.echo(visible(f"{found.name} {found.version}: {found.problem or 'works'}"))
        if not findings:
            click.echo("no harness is installed; run: agl harness install NAME")
        click.echo(visible(f"sandbox: {isolation.warning or 'bubblewrap works'}"))
    sys.exit(any(found.problem and not found.is_only_a_note for found in findings))


def _row(entry: Harness, program: Program | None) -> tuple[str, ...]:
    tried = entry.checked
    return (
        entry.name,
        entry.pin,
        _installed(entry, program),
        entry.dialect,
        f"{tried.version}, {tried.on}" if tried else "never",
        f"{len(tried.passed)} of {len(SITUATIONS)}" if tried else "",
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
