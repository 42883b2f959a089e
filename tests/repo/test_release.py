"""Packages for upload: complete metadata, and pages whose links lead to the repository at the release's tag."""

import re
import tomllib

import pytest

from tools.public import ROOT
from tools.release import absolute_links, entries, needs_of, projects, set_version, stage

PROJECTS = projects()
REPOSITORY = "https://example.org/agl/agl"


@pytest.mark.parametrize("name", PROJECTS)
def test_package_names_its_authors_licence_and_the_pythons_it_supports(name):
    data = PROJECTS[name]
    classifiers = data["classifiers"]
    pythons = [f"3.{minor}" for minor in (11, 12, 13) if f"<3.{minor}" not in data["requires-python"]]

    assert [{"name": "The agl authors"}] == data["authors"]
    assert (ROOT / "LICENSE").read_text() == (ROOT / "packages" / name / "LICENSE").read_text()
    assert pythons == re.findall(r"Programming Language :: Python :: (3\.\d+)", " ".join(classifiers))
    assert sorted(classifiers) == classifiers
    assert "Typing :: Typed" in classifiers
    assert data["keywords"]


@pytest.mark.parametrize("name", PROJECTS)
def test_uploaded_page_has_absolute_links_to_files_that_exist(name, tmp_path):
    stage(ROOT / "packages" / name, tmp_path / name, repository=REPOSITORY)

    text = (tmp_path / name / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    base = f"{REPOSITORY}/blob/v{PROJECTS[name]['version']}/"
    assert [] == [link for link in links if not link.startswith("https://")]
    ours = [link.removeprefix(base).partition("#")[0] for link in links if link.startswith(base)]
    assert [] == [path for path in ours if not (ROOT / path).is_file()]


def test_uploaded_metadata_names_the_repository_at_the_tag(tmp_path):
    stage(ROOT / "packages/agl-core", tmp_path / "agl-core", repository=REPOSITORY)

    urls = tomllib.loads((tmp_path / "agl-core/pyproject.toml").read_text())["project"]["urls"]
    tag = f"v{PROJECTS['agl-core']['version']}"
    assert REPOSITORY == urls["Homepage"]
    assert f"{REPOSITORY}/tree/{tag}/packages/agl-core" == urls["Source"]
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} == set(urls)


def test_links_in_code_and_within_the_page_stay():
    text = "[a](#here) [b](../b.md#c)\n```python\nx[0](y)\n```\n"
    expected = "[a](#here) [b](https://h/b.md#c)\n```python\nx[0](y)\n```\n"
    assert expected == absolute_links(text, page="docs/page.md", base="https://h")


def test_package_is_uploaded_after_what_it_depends_on():
    names = list(PROJECTS)
    wrong = [
        (name, other)
        for name in names
        for other in needs_of(PROJECTS[name])
        if other in names and names.index(other) > names.index(name)
    ]
    assert [] == wrong
    assert "agl-core" == names[0]


def test_new_version_is_set_with_the_bounds_that_follow(tmp_path, monkeypatch):
    package = tmp_path / "packages/agl-lightning"
    package.mkdir(parents=True)
    (package / "pyproject.toml").write_text((ROOT / "packages/agl-lightning/pyproject.toml").read_text())
    monkeypatch.setattr("tools.release.ROOT", tmp_path)

    set_version("1.4.0")

    data = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    bounds = [f"agl-{name}>=1.4,<1.5" for name in ("core", "inspect", "run")]
    assert ("1.4.0", bounds) == (data["version"], data["dependencies"])


def test_every_entry_of_the_changelog_has_a_kind_and_a_text():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = "|".join(kind["directory"] for kind in settings["type"])
    wrong = [file.name for file in entries() if not re.fullmatch(rf"[\w-]+\.(?:{kinds})\.md", file.name)]
    assert [] == wrong
    assert [] == [file.name for file in entries() if not file.read_text(encoding="utf-8").strip()]
    assert settings["start_string"] in (ROOT / settings["filename"]).read_text(encoding="utf-8")
