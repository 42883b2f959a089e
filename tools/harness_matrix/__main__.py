"""Runs the matrix: ``python -m tools.harness_matrix [HARNESS ...] [--only SCENARIO] [--write]``."""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agl.errors import AglError
from agl_harness.installation import Program, install, version_of
from agl_harness.table import SITUATIONS, Harness, load_table
from tools.harness_matrix.cells import Result, play
from tools.harness_matrix.knobs import KNOBS
from tools.harness_matrix.page import page_of, summary_of

ROOT = Path(__file__).parents[2]
_OFFLINE = "AGL_MATRIX_OFFLINE"
_BAR = 56
_SIDE_BY_SIDE = 2


def main() -> None:
    """Install the harnesses, leave the network, run the cells and write the page."""
    options = _parser().parse_args()
    table = {name: harness for name, harness in load_table().items() if name in KNOBS}
    chosen = {name: table[name] for name in options.harness or table}
    if _OFFLINE not in os.environ:
        for harness in chosen.values():
            _installed(harness)
        _leave_network()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        results, versions = asyncio.run(_play(chosen, options.only or SITUATIONS, folder))
    for result in results:
        counts = f"{result.calls} calls, {result.helpers} helpers, {result.rows} rows, {result.seconds:.0f} s"
        agents = ", ".join(result.agents)
        print(f"{result.harness:15} {result.scenario:15} {result.cause or 'green'} ({counts}) {agents}", flush=True)
    print(summary_of(results))
    if options.write:
        is_offline = os.environ.get(_OFFLINE) == "1"
        tried = {name: harness for name, harness in chosen.items() if name in versions}
        text = page_of(results, tried, versions, is_offline=is_offline)
        (ROOT / "docs/reference/harnesses.md").write_text(text, encoding="utf-8")
        green = sum(not result.cause for result in results)
        if green < _BAR:
            sys.exit(f"{green} cells are green, fewer than {_BAR}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("harness", nargs="*", help="names of harnesses; all without any")
    parser.add_argument("--only", action="append", choices=SITUATIONS, help="a scenario; repeatable")
    parser.add_argument("--keep", help="folder in which what the harnesses leave is kept")
    parser.add_argument("--write", action="store_true", help="write docs/reference/harnesses.md")
    return parser


def _installed(harness: Harness) -> Program | None:
    try:
        return install(harness)
    except AglError as error:
        print(f"{harness.label} is left out: {error}", flush=True)
        return None


def _leave_network() -> None:
    """Start again in a network namespace that has nothing but this machine's own addresses, if the kernel allows it."""
    command = [sys.executable, "-m", "tools.harness_matrix", *sys.argv[1:]]
    unshare = shutil.which("unshare")
    if unshare is not None:
        inside = [unshare, "--user", "--map-root-user", "--net", "--", "sh", "-c"]
        probe = subprocess.run([*inside, "ip link set lo up"], capture_output=True, text=True)
        if probe.returncode == 0:
            script = 'ip link set lo up && exec "$@"'
            os.execve(unshare, [*inside, script, "sh", *command], {**os.environ, _OFFLINE: "1"})
        print(f"not in a network namespace of its own: {probe.stderr.strip()}", flush=True)
    else:
        print("not in a network namespace of its own: there is no program unshare", flush=True)
    os.environ[_OFFLINE] = "0"


async def _play(
    chosen: dict[str, Harness], scenarios: Sequence[str], folder: Path
) -> tuple[list[Result], dict[str, str]]:
    found = {name: _installed(harness) for name, harness in chosen.items()}
    programs = {name: program for name, program in found.items() if program is not None}
    versions = {name: version_of(program, chosen[name]) or chosen[name].pin for name, program in programs.items()}
    lanes = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def cell(name: str, scenario: str, program: Program) -> Result:
        async with lanes:
            place = folder / name / f"cell-{SITUATIONS.index(scenario)}"
            place.mkdir(parents=True, exist_ok=True)
            return await play(chosen[name], program, KNOBS[name], scenario, place)

    cells = [cell(name, scenario, programs[name]) for name in programs for scenario in scenarios]
    return [*await asyncio.gather(*cells)], versions


if __name__ == "__main__":
    main()
