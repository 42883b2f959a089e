"""``agl init``: the files that it writes, and its messages."""

from importlib.metadata import distributions
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl.hints import pip_install
from agl_inspect.terminal.program import cli
from agl_run import load_config
from agl_run.cli.init import TEMPLATES
from agl_run.config.dataset import load_dataset

INSTALLED = {each.name for each in distributions()}


def init(*words: str) -> Result:
    return CliRunner().invoke(cli, ["init", *words], prog_name="agl")


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_is_an_experiment_with_an_agent_and_tasks(template: str, tmp_path: Path) -> None:
    assert 0 == init(str(tmp_path / "new"), "--template", template).exit_code

    config = load_config(tmp_path / "new" / "experiment.toml")
    train, val = (load_dataset(tmp_path / "new" / f"{name}.jsonl") for name in ("train", "val"))
    assert (template, "agent:solve", ("answer",)) == (
        config.experiment.name,
        config.experiment.agent,
        config.experiment.hidden,
    )
    assert (12, 24 if template == "prompt" else 6) == (len(train), len(val))
    assert not [task for task in val if task in train]
    compile((tmp_path / "new" / "agent.py").read_text(), "agent.py", "exec")


@pytest.mark.parametrize("template", TEMPLATES)
def test_answer_names_the_next_steps_and_the_packages_that_are_missing(template: str, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    missing = [name for name in TEMPLATES[template].needs if name not in INSTALLED]
    expected = [
        *map(pip_install, missing),
        f"cd {folder}",
        *filter(None, [TEMPLATES[template].command]),
        *(f"agl {command} experiment.toml" for command in ("check", "dev", "run")),
    ]
    lines = init(str(folder), "-t", template).output.splitlines()
    assert f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} into {folder}" == lines[0]
    assert {"agent.py", "experiment.toml", "train.jsonl", "val.jsonl"} <= {path.name for path in folder.iterdir()}
    assert f"next ({TEMPLATES[template].before}):" == lines[1]
    assert expected == [line.strip() for line in lines[2:]]


def test_folder_in_the_next_steps_is_quoted_for_a_shell(tmp_path: Path) -> None:
    lines = init(str(tmp_path / "my $HOME")).output.splitlines()
    assert f"cd '{tmp_path}/my $HOME'" in [line.strip() for line in lines]


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = init(str(tmp_path / "file" / "new"))
    assert (1, True) == (result.exit_code, "cannot write into" in result.stderr)


def test_files_that_exist_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("mine")
    result = init(str(tmp_path))
    assert (1, "mine") == (result.exit_code, (tmp_path / "agent.py").read_text())
    assert ["agent.py"] == [path.name for path in tmp_path.iterdir()]
    says = "has agent.py already, and agl init overwrites nothing; name a new folder: agl init NAME --template measure"
    assert says in result.output
