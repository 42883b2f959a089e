"""Starts a harness once, in a folder, with the model that the environment names: ``python -m agl_harness.launch``.

It is what ``agl harness run`` records. The folder is worked in as it is, the harness's home is a temporary folder, and
nothing is kept apart from the rest of the machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from agl.errors import AglError, ConfigError
from agl_harness.installation import require
from agl_harness.table import Model, fill, find


def main() -> None:
    """Run a harness to its end, and end with its exit status."""
    parser = argparse.ArgumentParser(prog="python -m agl_harness.launch")
    for option in ("--harness", "--folder", "--model", "--task"):
        parser.add_argument(option, required=True)
    given = parser.parse_args()
    try:
        sys.exit(launch(given.harness, folder=Path(given.folder), model=given.model, task=given.task))
    except AglError as error:
        sys.exit(f"agl: {error}")


def launch(name: str, *, folder: Path, model: str, task: str, environment: Mapping[str, str] | None = None) -> int:
    """Run a harness on a task, and return its exit status.

    Args:
        name: The harness or its file.
        folder: The folder that it works in.
        model: Name of the model.
        task: The task.
        environment: Has the model's address as ``OPENAI_BASE_URL`` and its key as ``OPENAI_API_KEY``; by default that
            of this process.

    Raises:
        ConfigError: There is no such harness, it is not installed, or no model is named.
    """
    given = os.environ if environment is None else environment
    base_url = given.get("OPENAI_BASE_URL", "")
    if not base_url:
        raise ConfigError("no model is named; set OPENAI_BASE_URL to its address, such as http://127.0.0.1:8000/v1")
    harness = find(name, folder=Path())
    program = require(harness)
    with tempfile.TemporaryDirectory(prefix="agl-harness-") as place:
        home = Path(place)
        filled = fill(
            harness,
            model=Model(base_url=base_url, key=given.get("OPENAI_API_KEY") or "none", name=model),
            prompt=task,
            home=home,
            workspace=folder.resolve(),
        )
        for path, text in filled.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text, encoding="utf-8")
        own = {"PATH": program.search_path, "HOME": str(home), **filled.environment}
        done = subprocess.run(
            [program.path, *filled.words[1:]],
            input=filled.stdin,
            env={**given, **own},
            cwd=folder,
            check=False,
        )
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


if __name__ == "__main__":
    main()
