"""``python -m agl_harness.launch``: runs a harness once in a folder, with the model that environment variables name.

``agl harness run`` records this command. The harness works directly in the folder, with a temporary home folder and
without a sandbox.
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
    """Run a harness to its end, and exit with the harness's exit status."""
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
        name: The harness's name, or the file that describes it.
        folder: The folder in which the harness works.
        model: The model's name.
        task: The task.
        environment: Variables, with the model's address in ``OPENAI_BASE_URL`` and its key in ``OPENAI_API_KEY``; by
            default those of this process.

    Raises:
        ConfigError: The harness does not exist or is not installed, or ``OPENAI_BASE_URL`` is not set.
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
