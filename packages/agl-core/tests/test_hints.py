"""Hints in messages: the name that was probably meant, and the command that installs a package."""

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from agl import hints
from agl.errors import ConfigError
from agl.hints import check_value, closest, did_you_mean, pip_install

PROJECT = '[project]\nname = "{name}"\ndependencies = {needs}\n'


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of three packages, from which the core is imported."""
    needs = {"agl-core": ["pluggy"], "agl-base": ["agl-core>=0.1,<0.2"], "agl-top": ["agl-core>=0.1", "agl-base>=0.1"]}
    for name, lines in needs.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "pyproject.toml").write_text(PROJECT.format(name=name, needs=lines))
    monkeypatch.setattr(hints, "__file__", str(tmp_path / "packages/agl-core/src/agl/hints.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_package_of_the_checkout_is_installed_from_there_with_those_that_it_needs(checkout: Path) -> None:
    assert "pip install -e packages/agl-core -e packages/agl-base -e packages/agl-top" == pip_install("agl-top")


def test_extra_is_asked_for_where_the_checkouts_package_is_named(checkout: Path) -> None:
    assert "pip install -e packages/agl-core -e 'packages/agl-base[gpu]'" == pip_install("agl-base[gpu]")


def test_checkout_is_named_by_its_whole_path_outside_of_it(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "elsewhere").mkdir()
    monkeypatch.chdir(checkout / "elsewhere")
    assert f"pip install -e {checkout}/packages/agl-core" == pip_install("agl-core")


@pytest.mark.parametrize(("package", "shown"), [("jinja2", "jinja2"), ("agl-other[x]", "'agl-other[x]'")])
def test_package_that_the_checkout_lacks_comes_from_the_index(package: str, shown: str, checkout: Path) -> None:
    assert f"pip install {shown}" == pip_install(package)


def test_installed_core_installs_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "__file__", str(tmp_path / "lib/python3.11/site-packages/agl/hints.py"))
    assert "pip install agl-rewards" == pip_install("agl-rewards")


def test_name_that_was_meant_is_asked_for() -> None:
    assert "did you mean 'turn'?" == did_you_mean("trun", ["role", "turn"], otherwise="there are two")


def test_name_that_resembles_none_gets_what_else_there_is_to_say() -> None:
    assert ("there are two", "") == (did_you_mean("x", ["role", "turn"], otherwise="there are two"), closest("x", []))


def test_cutoff_says_how_close_a_name_must_be() -> None:
    assert ("turns", "") == (closest("turn", ["turns"]), closest("turn", ["turns"], cutoff=0.9))


def test_word_of_a_longer_name_finds_the_shortest_name_with_it() -> None:
    assert ("sql-match", "") == (closest("sql", ["sql-executes", "sql-match"]), closest("sq", ["sql-match"]))
    assert ("", "") == (closest("1", ["conv-1"]), did_you_mean("is", ["is-a-number"]))


@pytest.mark.parametrize(
    ("value", "hint", "says"),
    [
        ("fast", float, 'optim.lr is "fast"; write a number without quotes, such as lr = 1e-06'),
        (-1.0, Annotated[float, Meta(ge=0, lt=1)], "optim.lr is -1.0; write a number of at least 0 and below 1"),
        ([0.9, 1.0], tuple[Annotated[float, Meta(lt=1)], ...], "optim.lr[1] is 1.0; write a number below 1"),
        ({"a": 1}, dict[str, str], 'optim.lr.a is 1; write one text in quotes: a = "..."'),
        ("no", float | Literal["auto"], 'optim.lr is "no"; write a number .*lr = 1e-06, or write one of auto'),
        (3, Annotated[str, Meta(min_length=1)], 'optim.lr is 3; write one text in quotes: lr = "..."'),
        (5, Annotated[list[str], Meta(min_length=1)], 'optim.lr is 5; write an array of texts, such as lr = ["NAME"]'),
        (float("nan"), Annotated[float, Meta(ge=0)], "optim.lr is nan; write a number of at least 0"),
        ("", Annotated[str, Meta(min_length=1)], 'optim.lr is ""; correct it: Expected `str` of length >= 1'),
    ],
)
def test_value_that_does_not_fit_is_refused_with_what_to_write(value: object, hint: object, says: str) -> None:
    pattern = says if ".*" in says else re.escape(says)
    with pytest.raises(ConfigError, match=f"^the algorithm 'grpo': {pattern}$"):
        check_value(value, hint, "the algorithm 'grpo': optim.lr", example=1e-06)
