"""Runs the ``agl`` command as a user does, in a separate process, or faster in this one."""

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

from click.testing import CliRunner

from agl_inspect.terminal.program import cli


def run_agl(*words: str, folder: Path) -> str:
    """Run ``agl`` in ``folder``, and return its standard output.

    The command stores its state in ``folder`` too, and gets an API key that no API accepts.

    Raises:
        AssertionError: The command failed; the message is its output.
    """
    environment = {**os.environ, **_variables(folder)}
    command = [sys.executable, "-m", "agl", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def invoke_agl(*words: str, folder: Path) -> str:
    """Run ``agl`` like :func:`run_agl`, within this process; for commands that import nothing from ``folder``."""
    with chdir(folder):
        done = CliRunner().invoke(cli, words, env=_variables(folder))
    if done.exit_code:
        raise AssertionError(done.output) from done.exception
    return done.stdout


def _variables(folder: Path) -> dict[str, str]:
    return {"OPENAI_API_KEY": "none", "XDG_STATE_HOME": str(folder / "state")}
