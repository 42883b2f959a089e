"""Starts a harness of agl-harness' table in a home and a folder of its own, for a limited time."""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_harness.installation import Program
from agl_harness.table import Harness, Model, fill

_KEPT = ("LANG", "LC_ALL", "TZ")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a harness: its exit status, -1 after the time limit, and what it printed."""

    status: int
    printed: str


async def run_harness(
    harness: Harness,
    program: Program,
    *,
    model: Model,
    prompt: str,
    folder: Path,
    arguments: Sequence[str] = (),
    variables: dict[str, str] | None = None,
    files: dict[str, str] | None = None,
    limit_s: float = 120.0,
) -> Ended:
    """Run a harness once; ``folder`` keeps its home and its workspace between runs."""
    home, workspace = folder / "home", folder / "work"
    for path in (home, workspace):
        path.mkdir(parents=True, exist_ok=True)
    launch = fill(harness, model=model, prompt=prompt, home=home, workspace=workspace, arguments=arguments)
    for name, text in {**launch.files, **(files or {})}.items():
        place = home / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    environment = {
        **{name: os.environ[name] for name in _KEPT if name in os.environ},
        "HOME": str(home),
        "PATH": program.search_path,
        "TERM": "dumb",
        "CI": "1",
        **launch.environment,
        **(variables or {}),
    }
    process = await asyncio.create_subprocess_exec(
        program.path,
        *launch.words[1:],
        cwd=workspace,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(launch.stdin), limit_s)
    except TimeoutError:
        return Ended(status=-1, printed="")
    finally:
        _kill(process.pid)
        if process.returncode is None:
            await process.wait()
    return Ended(status=process.returncode or 0, printed=printed.decode(errors="replace"))


def _kill(group: int) -> None:
    """End what the harness left running."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
