"""``agl doctor``: examines a deployment and prints what is wrong."""

import asyncio
import sys

import click

from agl import PluginManager
from agl_gateway.cli.examination import Finding, examine, forget_gone, patient_of
from agl_inspect.terminal import json_option, pass_manager, print_json, with_store
from agl_inspect.text import visible

_MARKS = {"ok": "ok     ", "warning": "warning", "wrong": "WRONG  "}


@click.command()
@click.argument("target", required=False, default="")
@click.option("--forget", is_flag=True, help="Take the gateways that are gone off the store's list.")
@json_option
@pass_manager
def doctor(manager: PluginManager, target: str, forget: bool, as_json: bool) -> None:
    """Examine a deployment: an experiment's file, the URL of a gateway or a store; by default the only store here.

    Looks at versions, secrets, ports, disks, encryption, clocks, the gateway's token and health, the store's writes,
    and spools that nobody drains. Exit status 1 if something is wrong.
    """
    patient = patient_of(target)
    if forget:
        count = with_store(manager, patient.store_url, forget_gone)
        click.echo(f"took {count} gateways off the list")
        return
    found = asyncio.run(examine(patient, manager))
    if as_json:
        print_json(found)
    else:
        for finding in found:
            click.echo(visible(_line(finding)))
        click.echo(_summary(found))
    if any(finding.state == "wrong" for finding in found):
        sys.exit(1)


def _line(finding: Finding) -> str:
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{_MARKS[finding.state]}  {finding.check}: {finding.text}{advice}"


def _summary(found: list[Finding]) -> str:
    wrong, warnings = (sum(finding.state == state for finding in found) for state in ("wrong", "warning"))
    if wrong or warnings:
        return f"{len(found)} checks: {wrong} wrong, {warnings} warnings"
    return f"{len(found)} checks: all is well"
