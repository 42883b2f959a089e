"""The page of supported systems says what the sessions and the packages' metadata say."""

import ast
import re
import tomllib
from typing import Any

from tools.public import ROOT

PAGE = (ROOT / "docs/reference/supported.md").read_text(encoding="utf-8")
ROWS = [tuple(cell.strip(" `") for cell in line.split("|")[1:-1]) for line in PAGE.splitlines() if "|" in line]


def of_noxfile(name: str) -> Any:
    """A constant of the noxfile, which is not imported, because nox is not installed everywhere."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == name)


def test_page_has_the_oldest_release_of_every_framework():
    expected = {
        (package, re.sub(r"\[.*\]", "", line.split("==")[0]), line.split("==")[1])
        for package, versions in of_noxfile("ADAPTERS").items()
        for line in versions["oldest"]
        if "==" in line
    }
    assert expected == {row for row in ROWS if row[0].startswith("agl-")}


def test_page_has_the_releases_of_frameworks_without_an_adapter():
    lines = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", line) for line in of_noxfile("GENERIC")]
    expected = [match.groups() for match in lines if match]
    assert expected == [row for row in ROWS if row[1:] and row[1].startswith(">=")]


def test_page_has_every_python_that_is_tested():
    (row,) = [row for row in ROWS if row[0] == "Python"]
    assert of_noxfile("PYTHONS") == row[1].split(", ")


def test_page_has_the_operating_systems_of_the_metadata():
    (row,) = [row for row in ROWS if row[0] == "Operating system"]
    found: set[str] = set()
    for file in ROOT.glob("packages/*/pyproject.toml"):
        classifiers = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["classifiers"]
        found |= {line.rpartition(" :: ")[2] for line in classifiers if line.startswith("Operating System")}
    assert found == set(row[1].split(", "))


def test_page_has_the_majors_of_openais_client():
    majors = re.findall(r'"openai>=(\d)', (ROOT / "noxfile.py").read_text(encoding="utf-8"))
    assert sorted(set(majors)) == re.findall(r"\d", re.findall(r"OpenAI's client.*majors ([\d and]+),", PAGE)[0])
