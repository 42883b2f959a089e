"""``agl check`` finds mistakes that would otherwise fail only in the first rollouts."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli

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
    monkeypatch.delitem(sys.modules, "checked_agent", raising=False)


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
    ) in result.output
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
        ("Answer as {json: 1}", "'{json: 1}' is read as a placeholder and is not one"),
        ('Answer as {"answer": 1}', "'{\"answer\": 1}' is read as a placeholder and is not one"),
        ("Answer as {answer:[1, 2]}", "'{answer:[1, 2]}' is read as a placeholder and is not one"),
        ("Answer as {}", "'{}' is read as a placeholder and is not one"),
        ("Answer as {0}", "'{0}' is read as a placeholder and is not one"),
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


ADAPTER = """
from agl import TracerEntry, contracts, hookimpl

class Tracer(contracts.Tracer):
    def install(self): ...
    def uninstall(self): ...

@hookimpl
def agl_tracers():
    for name in ("pigeon", "loft"):
        yield TracerEntry(name=name, factory="agl_pigeon:Tracer", frameworks=("pigeonframe",))
"""
NEEDED = 'pigeon-frame>=1.0,<2; python_version >= "3"'


@pytest.fixture
def adapter(install_plugin: Callable[..., None], site: Path) -> Callable[[str], None]:
    """Install a framework's adapter, and a release of the framework, or no framework for ``""``."""

    def install(release: str) -> None:
        extra = 'pigeon-nest>=9; extra == "nest"'
        install_plugin("agl-pigeon", ADAPTER, entry="pigeon", requires=("agl-core", NEEDED, extra))
        if release:
            (site / "pigeonframe.py").write_text("")
            info = site / f"pigeon_frame-{release}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pigeon-frame\nVersion: {release}\n")

    return install


@pytest.mark.parametrize(
    ("release", "state"),
    [("", "it is not installed"), ("0.9", "pigeon-frame 0.9 is installed"), ("2.0", "pigeon-frame 2.0 is installed")],
)
@pytest.mark.parametrize("command", ["check", "run", "dev"])
def test_framework_that_is_absent_or_of_another_release_is_found(
    adapter: Callable[[str], None], tmp_path: Path, release: str, state: str, command: str
) -> None:
    adapter(release)
    check(tmp_path, '[gateway]\nuse = "none"\n')
    (tmp_path / "e.toml").write_text(f'tracers = ["pigeon"]\n{BASE}')
    result = CliRunner().invoke(cli, [command, str(tmp_path / "e.toml")])

    assert (
        f"Error: the tracer 'pigeon' (agl-pigeon 1.0) needs pigeon-frame<2,>=1.0, and {state}; run: pip install "
        "'pigeon-frame<2,>=1.0', or take 'pigeon' out of tracers\n"
    ) in result.output
    assert 1 == result.exit_code


WARNING = "warning: the agent imports pigeonframe, whose tracer is installed and not listed; write tracers = ["


@pytest.mark.parametrize(
    "agent",
    [f"import pigeonframe\n{AGENT}", f"{AGENT}    from pigeonframe import fly\n", f"import coop\n{AGENT}"],
    ids=["at the top", "in a function", "through another module"],
)
def test_tracer_of_the_agents_framework_that_is_not_listed_is_a_warning(
    adapter: Callable[[str], None], tmp_path: Path, site: Path, agent: str
) -> None:
    adapter("1.5")
    (site / "coop.py").write_text("import pigeonframe\n")
    result = check(tmp_path, agent=agent)

    assert 0 == result.exit_code, result.output
    assert 1 == result.output.count(f'{WARNING}"loft"] above the first section, so that calls')
    assert "no error found; start with: agl run" in result.output


def test_listed_tracer_is_not_warned_of_under_its_other_name(adapter: Callable[[str], None], tmp_path: Path) -> None:
    adapter("1.5")
    check(tmp_path, agent=f"import pigeonframe\n{AGENT}")
    (tmp_path / "e.toml").write_text(f'tracers = ["pigeon"]\n{BASE}')
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "e.toml")])

    assert (0, True) == (result.exit_code, "no problem found" in result.output), result.output


def test_module_of_the_experiment_is_not_mistaken_for_a_framework(
    adapter: Callable[[str], None], tmp_path: Path
) -> None:
    adapter("")
    (tmp_path / "pigeonframe.py").write_text("")
    result = check(tmp_path, agent=f"import pigeonframe\n{AGENT}")
    sys.modules.pop("pigeonframe")

    assert "no problem found" in result.output


def test_tasks_that_are_no_objects_are_a_warning(tmp_path: Path) -> None:
    result = check(tmp_path, train='"what is 2?"\n"what is 3?"\n')

    assert 0 == result.exit_code, result.output
    assert "warning: the task 'what is 2?' is not an object; rewards and prompts that read a key" in result.output
    assert "no error found; start with: agl run" in result.output


TUNER = """
from agl import AlgorithmEntry, CreditEntry, hookimpl

class Even:
    def assign(self, group): ...

class Tuner:
    setup = step = state = restore = None

    async def close(self):
        pass

@hookimpl
def agl_algorithms():
    yield AlgorithmEntry(name="tuner", factory=Tuner, tunes=("prompt_template",), needs_token_ids=False)

@hookimpl
def agl_credits():
    yield CreditEntry(name="even", factory=Even)
"""

CREDIT = '[credit]\nuse = "even"\n'
NO_EFFECT = "[credit] use = 'even' has no effect: a credit spreads rewards over the calls that train weights, and no"


def test_credit_without_an_algorithm_that_trains_weights_is_a_warning(
    tmp_path: Path, install_plugin: Callable[..., None]
) -> None:
    install_plugin("agl-tuner", TUNER, entry="tuner")
    result = check(tmp_path, CREDIT)

    assert 0 == result.exit_code, result.output
    assert f"warning: {NO_EFFECT} algorithm here does that; remove it" in result.output
    assert "warning" not in check(tmp_path, '[credit]\nuse = "episode"\n').output


def test_run_says_once_that_its_credit_has_no_effect(
    tmp_path: Path, install_plugin: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install_plugin("agl-tuner", TUNER, entry="tuner")
    assert 0 == check(tmp_path, CREDIT, train='{"q": 1}\n{"q": 2}\n').exit_code
    result = CliRunner().invoke(cli, ["run", str(tmp_path / "e.toml")])

    assert 0 == result.exit_code, result.output
    said = [record.getMessage() for record in caplog.records if "[credit]" in record.getMessage()]
    assert [True] == [text.startswith(NO_EFFECT) for text in said]


def test_credit_of_an_algorithm_on_prompts_is_a_warning(tmp_path: Path, install_plugin: Callable[..., None]) -> None:
    install_plugin("agl-tuner", TUNER, entry="tuner")
    own = '[resource.text]\ntemplate = "hi"\n[[algorithm]]\nuse = "tuner"\ncredit = { use = "even" }\n'
    result = check(tmp_path, own)

    assert 0 == result.exit_code, result.output
    assert "warning: credit of the algorithm 'tuner' has no effect" in result.output
    assert "this one tunes text; remove it" in result.output


def test_work_that_takes_longer_than_a_second_is_told_on_standard_error(tmp_path: Path) -> None:
    slow = f"import time\n{AGENT}time.sleep(1.5)\n"
    result = check(tmp_path, agent=slow)
    assert 0 == result.exit_code, result.output
    first, last = result.stderr.splitlines()
    assert ("reading e.toml, its tasks and its agent ...", True) == (first, ": done after " in last)
    assert "reading" not in result.stdout


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"rival": "llm"}, "no problem found"),
        ({"rival": "lmm"}, "[policy.rival] of = 'lmm' is no policy with versions of its own; did you mean 'llm'?"),
        ({"rival": "rival"}, "[policy.rival] of = 'rival' is no policy with versions of its own; there are ['llm']"),
        ({"rival": "llm", "other": "llm"}, "several policies have use = 'past' and of = 'llm'; keep one of them"),
    ],
)
def test_opponents_are_versions_of_another_policy_with_one_each(
    tmp_path: Path, names: dict[str, str], words: str
) -> None:
    opponents = [f'[policy.{name}]\nuse = "past"\nof = "{of}"\n' for name, of in names.items()]
    assert words in check(tmp_path, LOCAL + 'api_key_env = ""\n', *opponents).output
