"""Runs the ``agl`` command as a user does, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def run_agl(*words: str, folder: Path) -> str:
    """Run ``agl`` in ``folder``, where it also keeps its state, with a key that no API takes; returns its output.

    Raises:
        AssertionError: It failed; has its output.
    """
    environment = {**os.environ, "OPENAI_API_KEY": "none", "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "agl", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout
