"""The tutorial about an algorithm for weights runs as a reader would run it."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"

_spec = importlib.util.spec_from_file_location("agl_docs_runner", DOCS / "tests" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_runner = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_runner)

run_page = _runner.run_page


@pytest.mark.long  # it starts a process for each command, and most of them import torch
def test_page_runs(run_page: Callable[[Path], None]) -> None:
    run_page(DOCS / "tutorial" / "weights.md")
