"""The examples on the page about losses and estimators run."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"

_spec = importlib.util.spec_from_file_location("agl_docs_runner", DOCS / "tests" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_runner = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_runner)

run_page = _runner.run_page


def test_page_runs(run_page: Callable[[Path], None]) -> None:
    run_page(DOCS / "reference" / "objectives.md")


def test_page_of_the_mathematics_shows_every_loss_and_estimator_as_it_is() -> None:
    sys.path.insert(0, str(DOCS.parent))
    from agl_objectives.registry import estimators, losses
    from tools import figures

    text = (DOCS / "explanation" / "objectives-mathematics.md").read_text(encoding="utf-8")
    assert [] == [entry.name for entry in [*losses(), *estimators()] if f"\n### `{entry.name}`" not in text]
    pages = text + (DOCS / "how-to" / "roles.md").read_text(encoding="utf-8")
    assert [] == [name for name in figures.FIGURES if f"(../images/objectives/{name}.svg)" not in pages]
    assert [] == figures.stale()


def test_page_names_every_loss_and_estimator() -> None:
    from agl_objectives.registry import estimators, losses

    text = (DOCS / "reference" / "objectives.md").read_text(encoding="utf-8")
    names = [entry.name for entry in [*losses(), *estimators()]]
    assert [] == [name for name in names if f"\n| `{name}` |" not in text]
