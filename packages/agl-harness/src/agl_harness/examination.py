"""Examines an installed harness: reads its version, and runs it on one task with a scripted model."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from agl.errors import AglError
from agl.hints import pip_install
from agl.schemas import Record
from agl_harness.installation import require, version_of
from agl_harness.table import Harness
from agl_run.programs import BoundProcess, PrintedText

_TURN_S = 120.0
_WORD = "agl-harness-works"


class Finding(Record, frozen=True, kw_only=True):
    """The result of examining a harness on this machine.

    Attributes:
        name: The harness's name.
        version: The installed version; ``""`` if it is unknown.
        problem: A problem and its remedy, for people; ``""`` if the harness works.
        is_only_a_note: True if ``problem`` is only a note, and the harness may work nevertheless.
    """

    name: str
    version: str = ""
    problem: str = ""
    is_only_a_note: bool = False


def examine(harness: Harness, *, given: str) -> Finding:
    """Examine a harness, which takes a few seconds; ``given`` is the name or file by which a user chose it."""
    try:
        program = require(harness)
    except AglError as error:
        return Finding(name=harness.name, problem=str(error))
    version = version_of(program, harness)
    note = problem = ""
    if find_spec("agl_testing") is None:
        note = f"it is installed and was not tried; for the scripted model run: {pip_install('agl-testing')}"
    elif harness.dialect == "google":
        note = "it is installed and was not tried, because the scripted model does not speak Google's API"
    elif not (problem := _turn(given)) and harness.pin and version and version != harness.pin:
        note = f"works, in another version than the {harness.pin} of the table, which agl harness install installs"
    return Finding(name=harness.name, version=version, problem=problem or note, is_only_a_note=bool(note))


def _turn(given: str) -> str:
    """Run the harness on a task with a scripted model; return a description of the failure, ``""`` for success."""
    server = [sys.executable, "-m", "agl_testing.model_server", "--text", _WORD]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as model,
    ):
        try:
            assert model.stdout is not None  # noqa: S101  # started with a pipe
            environment = {**os.environ, "OPENAI_BASE_URL": model.stdout.readline().strip(), "OPENAI_API_KEY": "none"}
            options = ["--harness", given, "--folder", folder, "--model", "scripted", "--task", "Say a word."]
            words = [sys.executable, "-m", "agl_harness.launch", *options]
            code, output, errors = asyncio.run(_run(words, environment))
        except TimeoutError:
            return f"it did not answer a task within {_TURN_S:g} s"
        finally:
            model.terminate()
    if _WORD in output:
        return ""
    return f"the model's answer did not come back (exit status {code}): {(errors or output).strip()[-400:]}"


async def _run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a program, and end all processes it started; returns its exit status, standard output and standard error."""
    pipe = asyncio.subprocess.PIPE
    kept = await BoundProcess.start(
        words, environment=environment, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    output, errors = PrintedText(), PrintedText()
    try:
        assert kept.process.stdout is not None and kept.process.stderr is not None  # noqa: S101, PT018  # with pipes
        async with asyncio.timeout(_TURN_S):
            await asyncio.gather(output.read(kept.process.stdout), errors.read(kept.process.stderr))
            return await kept.wait(), output.text(), errors.text()
    finally:
        await kept.kill()
