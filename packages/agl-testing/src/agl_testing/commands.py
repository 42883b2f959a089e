"""Runs the ``agl`` command as a user does, in a separate process."""

import os
import subprocess
import sys
from pathlib import Path


def run_agl(*words: str, folder: Path) -> str:
    """Run ``agl`` in ``folder``, and return its standard output.

    The command stores its state in ``folder`` too, and gets an API key that no API accepts.

    Raises:
        AssertionError: The command failed; the message is its output.
    """
    environment = {**os.environ, "OPENAI_API_KEY": "none", "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "agl", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout
