"""Every code block of the documentation and of the README files runs, and every link leads somewhere.

A page that another test names runs there, because it needs a plugin or a framework that is not installed here; so does
the README of a package that is not installed. Their blocks are only read here.
"""

import re
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in FILES}
TESTS = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py")]
ELSEWHERE = {name for test in TESTS for name in re.findall(r'"([\w-]+\.md)"', test.read_text(encoding="utf-8"))}
BY_SECTION = {"other-languages.md"}
"""Pages that test_languages.py runs section by section, because they need compilers and the like."""

INSTALLED = {distribution.name for distribution in metadata.distributions()}
LINK = re.compile(r"\]\(([^)\s]+)\)")


def is_run_here(page: str) -> bool:
    path = PAGES[page]
    if path.name == "README.md":
        return path.parent == ROOT or path.parent.name in INSTALLED
    return path.name not in ELSEWHERE | BY_SECTION


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [link for link in LINK.findall(prose) if not link.startswith(("http://", "https://"))]


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page, run_page):
    run_page(PAGES[page], is_run=is_run_here(page))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in links(PAGES[page]):
        name, _, anchor = link.partition("#")
        target = (PAGES[page].parent / name).resolve() if name else PAGES[page]
        assert target.is_file(), f"{link} is not a file: a site and a package's page have no folders"
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in links(index)}
    assert set() == {path for path in ROOT.glob("docs/*/*.md") if path.resolve() not in linked}


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_one_sentence_per_line(page):
    prose = re.sub(r"```.*?```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [re.sub(r"`[^`]*`", "`code`", line) for line in prose.splitlines() if not line.startswith("|")]
    assert [] == [line for line in lines if re.search(r"(?<!\bDr)(?<=[a-z`)])\. +[A-Z`]", line)]


def test_readme_opens_with_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [f"python3 -m pip install nox uv && python3 -m nox -s {session}" for session in ("demo", "tests")]
    assert commands == re.findall(r"^(?:\$ )?(python3 -m pip install nox uv.*)$", text, re.MULTILINE)


def test_readme_has_every_package():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")]
    assert [] == [name for name in packages if f"[`{name}`](packages/{name}/README.md)" not in text]
