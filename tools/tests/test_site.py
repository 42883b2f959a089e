"""The built site: its pages have all that they name, load nothing from elsewhere, and mistakes end its build.

``nox -s site`` builds it and runs these tests, which read the pages as a browser gets them.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tools.public import MODULES, ROOT, names_of
from tools.site import OUT, build, deploy, linked, pages, stage

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""The attributes by which elements load something while a page is shown; of links, only those of a stylesheet do."""


@dataclass
class Page(HTMLParser):
    """A page's anchors, links and what it loads."""

    file: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.classes |= set(given.get("class", "").split())
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given["href"])
        elif given.get(LOADED.get(tag, "")):
            self.loaded.append(given[LOADED[tag]])


@cache
def built() -> dict[Path, Page]:
    """Every page of the site by its file; the page for wrong addresses has links from the server's root."""
    files = [file for file in OUT.rglob("*.html") if file.name != "404.html"]
    assert files, "there is no site: run nox -s site, which builds it before it runs these tests"
    return {file: Page(file) for file in files}


def page_of(path: str) -> Path:
    """The file that a page of the repository became."""
    name = re.sub(r"(^|/)(README|index)$", r"\1", path.removesuffix(".md"))
    return OUT / name / "index.html"


def target(page: Page, link: str) -> tuple[Path, str]:
    """The file and the anchor that a link leads to."""
    name, _, anchor = unquote(link).partition("#")
    file = Path(os.path.normpath(page.file.parent / name)) if name else page.file
    return (file / "index.html" if file.is_dir() else file), anchor


def local(links: list[str]) -> Iterator[str]:
    yield from (link for link in links if not re.match(r"(https?:)?//|mailto:|data:", link))


def leads_somewhere(page: Page, link: str) -> bool:
    file, anchor = target(page, link)
    return file.is_file() and (not anchor or file not in built() or anchor in built()[file].ids)


def test_every_page_of_the_repository_is_in_the_site():
    assert [] == [path for path in pages(ROOT) if page_of(path) not in built()]
    assert len(pages(ROOT)) == len(built())


def test_every_link_of_every_page_leads_to_a_file_and_an_anchor_of_the_site():
    broken = {
        (file.relative_to(OUT).as_posix(), link)
        for file, page in built().items()
        for link in local([*page.links, *page.loaded])
        if not leads_somewhere(page, link)
    }
    assert set() == broken


def test_copy_buttons_take_commands_without_prompts_and_output():
    page = built()[page_of("docs/how-to/console.md")]
    (style,) = [link for link in page.loaded if link.endswith("copying.css")]
    hidden = re.findall(r"\.(\w+)", target(page, style)[0].read_text(encoding="utf-8"))
    assert {"gp", "go"} == set(hidden) & page.classes


def test_nothing_is_loaded_from_another_host():
    foreign = {link for page in built().values() for link in page.loaded if link not in list(local(page.loaded))}
    styles = [url for file in OUT.rglob("*.css") for url in re.findall(r"url\(['\"]?(https?:[^)]*)", file.read_text())]
    assert (set(), []) == (foreign, styles)
    # The theme's script fetches Mermaid and a player of videos from another host for elements of these classes.
    assert set() == {"mermaid", "video"} & set().union(*(page.classes for page in built().values()))


def anchors(path: str) -> list[str]:
    """The anchors that a code host gives to a page's headings, repeated ones with a number."""
    text = re.sub(r"^```.*?^```", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    slugs = [re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-") for title in plain]
    return [f"{slug}-{slugs[:i].count(slug)}" if slug in slugs[:i] else slug for i, slug in enumerate(slugs)]


@pytest.mark.parametrize("path", pages(ROOT))
def test_anchors_are_those_of_a_code_host(path):
    assert [] == [anchor for anchor in anchors(path) if anchor not in built()[page_of(path)].ids]


def test_pictures_are_in_the_site():
    pictures = [path for path in linked(ROOT) if path.endswith((".svg", ".png"))]
    assert {"docs/explanation/data-flow.svg", "docs/explanation/architecture.svg"} < set(pictures)
    assert [] == [path for path in pictures if (OUT / path).read_bytes() != (ROOT / path).read_bytes()]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_reference_of_a_module_can_be_searched_by_its_names(module):
    index = json.loads((OUT / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    texts = [f"{part['title']} {part['text']}" for part in index if f"/api/{module}/" in part["location"]]
    assert texts
    assert [] == [name for name in names_of(module) if not any(name in text for text in texts)]


def test_bars_in_the_code_of_tables_have_no_backslash():
    cells = [cell for file in built() for cell in re.findall(r"<td>.*?</td>", file.read_text(encoding="utf-8"))]
    assert [] != [cell for cell in cells if "|" in cell]
    assert [] == [cell for cell in cells if "\\|" in cell]


def test_reference_shows_signatures_with_colours_and_docstrings():
    text = page_of("docs/reference/api/agl.md").read_text(encoding="utf-8")
    section = text[text.index('<h2 id="emit_reward"') :]
    signature, _, rest = section.partition("</pre>")
    assert '<span class="kc">None</span>' in signature
    plain = re.sub(r"<[^>]*>", "", signature)
    assert "emit_reward(" in plain
    assert "value: RewardValue" in plain
    assert rest.index("Report a reward") < rest.index('id="')


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two pages, with the settings of this one."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    (tmp_path / "README.md").write_text("# Home\n\n[All](docs/index.md)\n")
    (tmp_path / "docs/index.md").write_text("# All\n\n## Guides\n\n- [One](one.md)\n")
    (tmp_path / "docs/one.md").write_text("# One\n\nText.\n")
    return tmp_path


WRONG = {
    "target 'docs/two.md' is not found": ("docs/one.md", "[x](two.md)"),
    "does not contain an anchor '#none'": ("docs/one.md", "[x](index.md#none)"),
    "unrecognized relative link 'docs'": ("README.md", "[x](docs)"),
    'not included in the "nav" configuration:\n  - docs/three.md': ("docs/three.md", "# Three"),
}
"""Mistakes by what the build says of them."""


def test_mistakes_end_the_build_and_are_named(repository, capfd):
    for path, text in WRONG.values():
        with (repository / path).open("a") as page:
            page.write(f"\n{text}\n")
    status = build(stage(repository, repository / "source"), repository / "site")
    said = capfd.readouterr().err
    assert (1, []) == (status, [message for message in WRONG if message not in said]), said


def test_version_is_committed_to_a_branch_with_its_alias(repository):
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("config", "user.name", "n")
    git("config", "user.email", "n@example.org")
    git("commit", "-q", "--allow-empty", "-m", "first")

    assert 0 == deploy(stage(repository, repository / "source"), root=repository, names=["0.1", "latest"])

    versions = json.loads(git("show", "gh-pages:versions.json"))
    assert [("0.1", ["latest"])] == [(one["version"], one["aliases"]) for one in versions]
    files = git("ls-tree", "-r", "--name-only", "gh-pages").splitlines()
    assert {"0.1/docs/one/index.html", "latest"} <= set(files)
