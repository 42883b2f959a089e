"""The page of algorithms has every parameter of every algorithm, as its factory takes it."""

import re

import pytest

from tools.algorithms import TARGET
from tools.components import entries, kind_of
from tools.public import source_of

FOUND = {entry.name: entry.factory for _, entry in entries() if kind_of(entry) == "algorithm"}


def sections() -> dict[str, str]:
    text = TARGET.read_text(encoding="utf-8")
    return dict(re.findall(r"^## `([\w-]+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def test_page_has_every_algorithm():
    assert list(FOUND) == list(sections())


@pytest.mark.parametrize("name", FOUND)
def test_table_has_every_keyword_of_the_factory(name):
    module, _, attribute = FOUND[name].partition(":")
    source = source_of(module)
    assert source is not None
    attribute = "DPO" if attribute == "IPO" else attribute  # whose constructor it has
    start = re.split(rf"^(?:class|def) {attribute}\b", source.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    signature = re.search(r"\*,\s*(.*?)\)? *(?:\) -> |\*\*config)", start, re.DOTALL)
    assert signature is not None
    keywords = re.findall(r"^\s*(\w+): ", signature[1].replace(", ", ",\n"), re.MULTILINE)
    assert keywords == re.findall(r"^\| `(\w+)` \|", sections()[name], re.MULTILINE)


def test_defaults_and_choices_are_written_as_in_an_experiment_file():
    assert "| `optim` | [table](#optim) | its own |" in sections()["grpo"]
    assert '| `optim` | [table](#optim) | `{ lr = 1e-05, decay = "linear" }` |' in sections()["sft"]
    tables = TARGET.read_text(encoding="utf-8").partition("## Tables")[2]
    assert '| `level` | `"token"`, `"sequence"`, `"geometric"` | `"token"` |' in tables
    assert "| `mask_truncated` | `bool` | `false` |" in tables
    assert "| `rank` | `int` | `0` |" in tables
