"""The how-to page of this package runs as a reader would run it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The documentation's own runner of code blocks, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    spec = importlib.util.spec_from_file_location("agl_docs_runner", DOCS / "tests" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("agent", None)


@pytest.mark.long
def test_page_runs(pages: ModuleType, tmp_path: Path) -> None:
    runner = pages.PageRunner(tmp_path)
    try:
        for block in pages.blocks_of(DOCS / "how-to" / "prompts.md"):
            runner.run(block)
    finally:
        runner.close()
