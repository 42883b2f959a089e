from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agl.errors import ConfigError
from agl_inspect.terminal.program import cli
from agl_run import learner_of, parse_config


def file_with(**learners: Any) -> Any:
    return {
        "experiment": {"agent": "agent:solve"},
        "resource": {"prompt": {"template": "Help."}},
        "algorithm": [{"use": "apo", "tunes": "prompt"}],
        "learn": learners,
    }


def test_learner_of_reads_the_table() -> None:
    given = {"tunes": "prompt", "gate": {"canary": {"share": [0.1, 0.5]}, "error": 0.1}}

    name, settings = learner_of(parse_config(file_with(support=given)))

    assert ("support", ("prompt",), (0.1, 0.5)) == (name, settings.tunes, settings.gate.canary.share)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tunes": ["prompt"], "evry": 3}, r"unknown key 'learn.support.evry'; did you mean 'every'\?"),
        ({"tunes": ["prompt"], "gate": {"canary": {"shares": [0.1]}}}, r"learn.support.gate.canary.shares.*'share'"),
        ({"every": 3}, "learn.support lacks tunes"),
        ({"tunes": ["prompt"], "every": 0}, "learn.support.every is 0; write a number of conversations, at least 1"),
    ],
)
def test_every_command_names_the_wrong_key_of_a_learner(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(file_with(support=given))


def test_learner_of_refuses_a_resource_that_no_algorithm_tunes() -> None:
    with pytest.raises(ConfigError, match=r"tunes has 'promt', which no \[\[algorithm\]\].*did you mean 'prompt'\?"):
        learner_of(parse_config(file_with(support={"tunes": "promt"})))


def test_learner_of_refuses_a_second_policy() -> None:
    policies = {"policy": {name: {"use": "torch", "model": "m"} for name in ("small", "large")}}
    given = {**file_with(support={"tunes": ["small", "large"]}), **policies}
    with pytest.raises(ConfigError, match="tunes has the policies small, large; a learner tunes at most one"):
        learner_of(parse_config(given))


@pytest.mark.parametrize("learners", [{}, {"one": {"tunes": "prompt"}, "two": {"tunes": "prompt"}}])
def test_learner_of_needs_exactly_one_table(learners: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs one table \[learn.NAME\]"):
        learner_of(parse_config(file_with(**learners)))


def test_check_needs_no_tasks_in_a_file_with_a_learner(folder: Path) -> None:
    said = CliRunner().invoke(cli, ["check", str(folder / "desk.toml")])

    assert "desk: its tasks are conversations" in said.output
    assert f"no problem found; start with: agl learn {folder}/desk.toml" in said.output


def test_check_names_what_is_wrong_with_a_learner(folder: Path) -> None:
    file = folder / "desk.toml"
    file.write_text(
        file.read_text(encoding="utf-8").replace('tunes = "prompt"\n', 'tunes = "promt"\n'), encoding="utf-8"
    )
    said = CliRunner().invoke(cli, ["check", str(file), "--set", 'algorithm.apo.tunes="prompt"'])

    assert 1 == said.exit_code
    assert "learn.support.tunes has 'promt'" in said.output
