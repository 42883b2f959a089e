"""Installation lines are true from a checkout and after publication, and one page has them all."""

import re

import pytest

from agl import hints
from tools.public import ROOT
from tools.release import needs_of, projects

PROJECTS = projects()
INSTALL = ROOT / "docs/how-to/install.md"
PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
SHORT = re.compile(r"^(?:\$ |    )pip install ['\"]?agl-", re.MULTILINE)


def from_checkout(name: str) -> list[str]:
    """A package after the packages of the repository that it needs, directly or not."""
    needed = {name}
    for other in reversed(PROJECTS):
        if other in needed:
            needed |= {need for need in needs_of(PROJECTS[other]) if need in PROJECTS}
    return [other for other in PROJECTS if other in needed]


def test_page_has_both_lines_of_every_package():
    expected = {
        name: (f"pip install {' '.join(f'-e packages/{part}' for part in from_checkout(name))}", f"pip install {name}")
        for name in PROJECTS
    }
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", INSTALL.read_text(), re.MULTILINE)
    assert expected == {name: (checkout, index) for name, checkout, index in rows}


@pytest.mark.parametrize("page", ["docs/how-to/install.md"])
def test_line_from_a_checkout_names_everything_that_it_needs(page):
    lines = re.findall(r"^\$ (pip install -e packages/.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        named = set(re.findall(r"packages/([\w-]+)", line))
        assert named == set().union(*(from_checkout(name) for name in named)), line


def test_page_that_installs_from_the_index_leads_to_the_lines_for_a_checkout():
    with_line = [page for page in PAGES if page != INSTALL and SHORT.search(page.read_text())]
    assert len(with_line) > 20
    assert [] == [page for page in with_line if not re.search(r"\]\([\w./-]*install\.md\)", page.read_text())]


@pytest.mark.parametrize("name", PROJECTS)
def test_message_of_a_checkout_installs_as_the_page_does(name, monkeypatch):
    monkeypatch.setattr(hints, "__file__", str(ROOT / "packages/agl-core/src/agl/hints.py"))
    monkeypatch.chdir(ROOT)
    said = re.findall(r"-e packages/([\w-]+)", hints.pip_install(name))
    assert (set(from_checkout(name)), name) == (set(said), said[-1])
