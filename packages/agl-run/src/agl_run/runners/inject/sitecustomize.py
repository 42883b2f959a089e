"""Starts the recording of a program, then runs the program's own ``sitecustomize``, which this one hides."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = str(Path(__file__).parent)


def _run_the_other() -> None:
    rest = [entry for entry in sys.path if entry != _HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "AGL_SPAN_FILE" in os.environ:
    try:
        from agl_run.runners.span_file import record_this_process
    except ImportError as error:
        sys.stderr.write(f"agl: this program is not recorded: {error}; install agl-core for {sys.executable}\n")
    else:
        record_this_process()
_run_the_other()
