"""Harnesses are installed into separate folders, and found there or on the PATH; an error names missing ones."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl.errors import ConfigError, RunError
from agl_harness import Harness, load_table
from agl_harness.command import harness as command
from agl_harness.installation import FOLDER_ENV, install, locate, place, require, version_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty PATH and a new folder for installed harnesses."""
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "harnesses"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    return tmp_path


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_own_installation_comes_before_the_path(folder: Path) -> None:
    pi = load_table()["pi"]
    assert locate(pi) is None
    on_path = program(folder / "path" / "pi", "echo 9.9.9")
    assert str(on_path) == require(pi).path

    ours = program(place(pi) / "node_modules" / ".bin" / "pi", "echo pi 0.73.1")
    found = require(pi)
    assert (str(ours), True) == (found.path, found.is_ours)
    assert "0.73.1" == version_of(found, pi)
    assert found.search_path.startswith(str(ours.parent))


def test_program_that_prints_no_version_has_none(folder: Path) -> None:
    mine = Harness(name="mine", command=("mine", "$prompt"))
    program(folder / "path" / "mine", "echo hello >&2; exit 3")
    assert "" == version_of(require(mine), mine)


def test_missing_harness_is_named_with_its_remedy(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pi is not installed.*install Node.js.*agl harness install pi"):
        require(load_table()["pi"])
    program(folder / "path" / "npm", "true")
    with pytest.raises(ConfigError, match=r"no program 'pi'; run: agl harness install pi"):
        require(load_table()["pi"])
    with pytest.raises(ConfigError, match="install it so that it is on the PATH"):
        require(Harness(name="mine", command=("mine", "$prompt")))


def test_python_that_is_missing_is_named(folder: Path) -> None:
    old = Harness(name="old", command=("old", "$prompt"), pip=("old==1",), python="3.2")
    with pytest.raises(ConfigError, match=r"there is no python3\.2 on the PATH"):
        install(old)


def test_npm_installs_the_pinned_version_once(folder: Path) -> None:
    made = 'while [ "$1" != --prefix ]; do shift; done; mkdir -p "$2/node_modules/.bin"; cd "$2/node_modules/.bin"'
    program(folder / "path" / "npm", f'{made}; echo "$3" >> asked; echo "echo 1" > pi; chmod +x pi')
    program(folder / "path" / "mkdir", 'exec /bin/mkdir "$@"')
    program(folder / "path" / "chmod", 'exec /bin/chmod "$@"')
    pi = load_table()["pi"]
    assert install(pi) == install(pi)
    assert "@mariozechner/pi-coding-agent@0.73.1\n" == (Path(install(pi).path).parent / "asked").read_text()


def test_failed_installation_leaves_nothing_and_says_why(folder: Path) -> None:
    program(folder / "path" / "npm", "echo no such package >&2; exit 1")
    pi = load_table()["pi"]
    with pytest.raises(RunError, match="pi was not installed; npm says: no such package"):
        install(pi)
    assert not place(pi).exists()
    program(folder / "path" / "npm", "true")
    with pytest.raises(RunError, match="brought no program 'pi'"):
        install(pi)


def test_list_has_every_harness_with_what_is_installed() -> None:
    pi = load_table()["pi"]
    program(place(pi) / "node_modules" / ".bin" / "pi", "true")
    lines = CliRunner().invoke(command, ["list"]).output.splitlines()
    assert ["NAME", *load_table()] == [line.split()[0] for line in lines]
    assert ["pi", "0.73.1", "0.73.1", "chat"] == lines[1].split()[:4]
    listed = json.loads(CliRunner().invoke(command, ["list", "--json"]).output)
    assert [True, False] == [listed[0]["program"] is not None, listed[1]["program"] is not None]
