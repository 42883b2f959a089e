"""The table of harnesses: the built-in entries are complete, and users can add their own."""

import json
import tomllib
from pathlib import Path

import pytest

from agl.errors import ConfigError
from agl_harness import Harness, Model, fill, find, load_file, load_table
from agl_harness.table import MAX_ARGUMENT

MODEL = Model(base_url="http://127.0.0.1:1/v1", key="secret-key", name='odd "name"', context=4096, output=256)

OWN = """
[mine]
command = ["node", "$folder/agent.js", "$arguments", "--model=$model"]
prompt = "stdin"
environment = { ENDPOINT = "$url", PRICE = "5$$" }
files = { ".mine/config.json" = '{"key": "$key", "name": "$model"}' }
"""


def filled(harness: Harness, prompt: str = "do it", **options: object) -> object:
    return fill(harness, model=MODEL, prompt=prompt, home=Path("/h"), workspace=Path("/w"), **options)


@pytest.mark.parametrize("name", load_table())
def test_entry_pins_a_version_and_leads_to_the_model_alone(name: str) -> None:
    harness = load_table()[name]
    launch = filled(harness)
    settings = [*launch.words, *launch.environment.values(), *launch.files.values()]

    assert harness.pin
    assert any("127.0.0.1:1" in text for text in settings)
    assert "secret-key" in launch.environment.values()
    assert not any("secret-key" in text for text in (*launch.words, *launch.files.values()))
    assert ("do it" in "".join(launch.words)) == (harness.prompt == "argument")
    assert (b"do it" if harness.prompt == "stdin" else b"") == launch.stdin


@pytest.mark.parametrize("name", load_table())
def test_files_of_an_entry_are_well_formed_whatever_the_model_is_called(name: str) -> None:
    for path, text in filled(load_table()[name]).files.items():
        json.loads(text) if path.endswith(".json") else tomllib.loads(text)


def test_entry_of_a_file_works_like_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(OWN)
    harness = find("mine.toml", folder=tmp_path)
    launch = filled(harness, arguments=["--fast", "$5"])

    assert ("node", f"{tmp_path}/agent.js", "--fast", "$5", '--model=odd "name"') == launch.words
    assert {"ENDPOINT": "http://127.0.0.1:1", "PRICE": "5$"} == launch.environment
    assert {"key": "secret-key", "name": 'odd "name"'} == json.loads(launch.files[".mine/config.json"])
    assert b"do it" == launch.stdin


def test_one_of_several_entries_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(OWN + OWN.replace("[mine]", "[other]"))
    assert "other" == find("two.toml#other", folder=tmp_path).name
    with pytest.raises(ConfigError, match=r"holds 2 harnesses; name one of them, as in two.toml#mine"):
        find("two.toml", folder=tmp_path)


def test_unknown_harness_names_the_close_one() -> None:
    with pytest.raises(ConfigError, match=r"there is no harness 'claude'; did you mean 'claude-code'\?"):
        find("claude", folder=Path())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[mine", "not valid TOML"),
        ('command = ["x"]', "begin each harness with"),
        ('[mine]\ncommand = []\nprompt = "stdin"', "command is empty"),
        ('[mine]\ncommand = ["x"]', r"no argument of the command holds \$prompt"),
        ('[mine]\ncommand = ["x", "$prompt"]\nenviron = {}', "the keys of a harness are"),
        ('[mine]\ncommand = ["x", "$prompt", "$modell"]', r"there is no placeholder \$modell; there are"),
        ('[mine]\ncommand = ["x", "$prompt", "5$"]', r"write \$\$ for a dollar sign"),
        ('[mine]\ncommand = ["x", "$prompt"]\nfiles = { "../x" = "" }', "not within the home folder"),
        ('[mine]\ncommand = ["x", "$prompt"]\nfiles = { "/etc/x" = "" }', "not within the home folder"),
    ],
)
def test_wrong_entry_is_refused_with_what_to_write(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_file(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("prompt", "problem"), [("x" * (MAX_ARGUMENT + 1), "131,072 bytes"), ("a\0b", "null character")]
)
def test_prompt_that_no_argument_holds_is_refused(prompt: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        filled(load_table()["aider"], prompt)


def test_arguments_need_their_place(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[mine]\ncommand = ["x", "$prompt"]')
    with pytest.raises(ConfigError, match=r"has no \$arguments"):
        filled(find("mine.toml", folder=tmp_path), arguments=["--fast"])
