"""``agl check`` finds what would fail in the first rollouts only."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agl_run.cli.main import cli

AGENT = "def solve(task):\n    return 1.0\n"
BASE = '[experiment]\nname = "e"\nagent = "checked_agent:solve"\ntrain = "train.jsonl"\nstore = "memory://"\n'


def check(folder: Path, *sections: str, train: str = '{"q": 1}\n', agent: str = AGENT) -> Any:
    (folder / "checked_agent.py").write_text(agent)
    (folder / "train.jsonl").write_text(train)
    (folder / "e.toml").write_text("\n".join((BASE, *sections)))
    return CliRunner().invoke(cli, ["check", str(folder / "e.toml")])


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(__import__("sys").modules, "checked_agent", raising=False)


HOSTED = '[policy.llm]\nuse = "openai"\nmodel = "m"\n'
LOCAL = HOSTED + 'base_url = "http://127.0.0.1:1/v1"\n'


@pytest.mark.parametrize(
    ("section", "place", "variable"),
    [
        (HOSTED, "policy.llm", "OPENAI_API_KEY"),
        (HOSTED + 'api_key_env = "MY_KEY"\n', "policy.llm", "MY_KEY"),
        (LOCAL + 'api_key_env = "MY_KEY"\n[gateway]\nuse = "none"\n', "policy.llm", "MY_KEY"),
        (
            '[[reward]]\nuse = "exact-match"\nparams = { judges = [{ api_key_env = "MY_KEY" }] }\n',
            "[reward]",
            "MY_KEY",
        ),
    ],
)
def test_key_that_is_not_set_is_found(
    tmp_path: Path, section: str, place: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = check(tmp_path, section)

    assert 1 == result.exit_code
    assert (
        f"Error: [{place}] takes its key from the environment variable {variable}, which is not set; set it, name "
        'another with api_key_env, or write api_key_env = "" if the server needs no key\n'
    ) == result.output
    monkeypatch.setenv(variable, "sk-1")
    assert "which is not set" not in check(tmp_path, section).output


@pytest.mark.parametrize(
    "section", [LOCAL + 'api_key_env = ""\n', LOCAL + '[gateway]\nuse = "none"\n'], ids=["no key", "no gateway"]
)
def test_server_that_needs_no_key_is_accepted(tmp_path: Path, section: str) -> None:
    result = check(tmp_path, section)
    assert 0 == result.exit_code, result.output


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Answer as {json: 1}", "'{json: 1}' is read as a placeholder and is none"),
        ('Answer as {"answer": 1}', "'{\"answer\": 1}' is read as a placeholder and is none"),
        ("Answer as {answer:[1, 2]}", "'{answer:[1, 2]}' is read as a placeholder and is none"),
        ("Answer as {}", "'{}' is read as a placeholder and is none"),
        ("Answer as {0}", "'{0}' is read as a placeholder and is none"),
        ("Answer as {question", "expected '}' before end of string"),
        ("Answer as }", "Single '}' encountered in format string"),
    ],
)
def test_braces_that_are_no_placeholder_are_found(tmp_path: Path, template: str, message: str) -> None:
    result = check(tmp_path, f"[resource.prompt]\ntemplate = '{template}'\n")

    assert (1, True) == (result.exit_code, f"Error: [resource.prompt] template: {message}" in result.output)
    assert 'write literal braces as {{ and }}, or set engine = "plain" or "jinja"' in result.output
    plain = check(tmp_path, f"[resource.prompt]\ntemplate = '{template}'\nengine = \"plain\"\n")
    assert 0 == plain.exit_code, plain.output


@pytest.mark.parametrize(
    "template",
    [
        "{question}",
        "{{json: 1}}",
        "{score:.2f} {n:>{width}} {total:,d}",
        "{task.name} {tasks[0]} {who!r:<5}",
        "{day:%H:%M}",
    ],
)
def test_placeholders_are_accepted(tmp_path: Path, template: str) -> None:
    result = check(tmp_path, f"[resource.prompt]\ntemplate = '{template}'\n")
    assert 0 == result.exit_code, result.output
