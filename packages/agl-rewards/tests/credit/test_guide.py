"""The how-to page of this package runs as a reader would run it."""

from collections.abc import Callable
from pathlib import Path

from docs.tests.conftest import run_page as run_page

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "counterfactual-credit.md"


def test_page_runs(run_page: Callable[[Path], None]) -> None:
    run_page(PAGE)
