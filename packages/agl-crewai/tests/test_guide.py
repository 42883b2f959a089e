"""The how-to page of this package runs as a reader would run it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from docs.tests.conftest import run_page as run_page

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "crewai.md"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # CrewAI's own, of its own parts


def test_page_runs(run_page: Callable[[Path], None]) -> None:
    pytest.importorskip("agl_gateway", reason="agl-gateway is not installed")
    run_page(PAGE)
