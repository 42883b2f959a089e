"""`agl check` and the constructors refuse what a run would refuse, before anything starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agl import PluginManager
from agl.errors import AglError
from agl_inspect.terminal.program import cli

OPTIMIZER = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
SHARED: dict[str, list[Any]] = {
    "patience": [0],
    "scoring.failure": [1.0, 2.0],
    "scoring.perfect": [-1.0, 0.0],
    "scoring.reserve": [-0.1, 1.0],
    "scoring.test": [-0.1, 1.0],
    "texts.max_chars": [-1],
    "budget.prices": [{"input": -1.0}, {"rollout": -0.1}],
    "budget.rollouts": [-1],
    "publish": ["improvements"],
    "optimizer": [
        {**OPTIMIZER, "max_tokens": 0},
        {**OPTIMIZER, "timeout_s": 0},
        {**OPTIMIZER, "wait_s": -1},
        {**OPTIMIZER, "retry_s": -1},
        {**OPTIMIZER, "temperature": -0.5},
    ],
}
RACED: dict[str, list[Any]] = {"beam_rounds": [-1], "val_batch_size": [0]}
OWN: dict[str, dict[str, list[Any]]] = {
    "apo": {
        **RACED,
        "parents.beam_width": [0],
        "branch_factor": [0],
        "gradient_batch_size": [0],
        "parents.selector": ["mixd"],
        "parents.p_best": [-0.1, 1.1],
    },
    "gepa": {"reflection_minibatch_size": [0], "phases": [0]},
    "random": RACED,
}
CASES = [
    (algorithm, name, value)
    for algorithm, own in OWN.items()
    for name, values in {**SHARED, **own}.items()
    for value in values
]


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.from_environment()


@pytest.mark.parametrize(("algorithm", "name", "value"), CASES)
def test_value_that_makes_no_sense_is_refused_with_the_parameters_name(
    manager: PluginManager, algorithm: str, name: str, value: Any
) -> None:
    table, _, key = name.partition(".")
    with pytest.raises(AglError) as caught:
        manager.build(manager.algorithm(algorithm), **{"optimizer": OPTIMIZER, table: {key: value} if key else value})
    message = str(caught.value)
    assert {"reflection_minibatch_size": "minibatch"}.get(name, key or table) in message
    assert 1 == len(message.splitlines())


def test_misspelt_choice_is_answered_with_the_closest_and_with_all(manager: PluginManager) -> None:
    with pytest.raises(AglError, match=r"write one of improvement, end; did you mean 'improvement'\?"):
        manager.build(manager.algorithm("apo"), optimizer=OPTIMIZER, publish="improvment")


def check(folder: Path, algorithm: str, *options: str, tasks: int = 20, **params: Any) -> Any:
    (folder / "checked_prompts.py").write_text("def solve(task, prompt):\n    return 1.0\n")
    for name, first in (("train", 0), ("val", 50)):
        lines = (json.dumps({"q": first + number}) for number in range(tasks))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    written = "\n".join(f"{name} = {json.dumps(value)}" for name, value in params.items())
    (folder / "e.toml").write_text(f"""
[experiment]
name = "e"
agent = "checked_prompts:solve"
train = "train.jsonl"
val = "val.jsonl"
[resource.prompt]
template = "Answer {{q}}"
[[algorithm]]
use = "{algorithm}"
[algorithm.params]
optimizer = {{ base_url = "http://127.0.0.1:9/v1", model = "m" }}
{written}
""")
    sys.modules.pop("checked_prompts", None)
    return CliRunner().invoke(cli, ["check", str(folder / "e.toml"), *options])


@pytest.mark.parametrize("algorithm", OWN)
def test_check_refuses_a_budget_that_is_too_small_for_the_tasks(tmp_path: Path, algorithm: str) -> None:
    result = check(tmp_path, algorithm, budget=20)

    assert 1 == result.exit_code
    assert result.output.startswith(f"Error: {algorithm} has a budget of 20 rollouts and needs at least ")
    assert [] == [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__"]


def test_check_refuses_a_budget_that_is_too_small_where_the_prompt_has_a_label(tmp_path: Path) -> None:
    result = check(tmp_path, "apo", '--set=resource.prompt.label="production"', budget=20)

    assert result.output.startswith("Error: apo has a budget of 20 rollouts and needs at least ")


def test_check_accepts_an_empty_text_of_a_prompt_with_a_label_which_may_point_to_another(tmp_path: Path) -> None:
    options = ('--set=resource.prompt.label="production"', '--set=resource.prompt.template=""')
    result = check(tmp_path, "apo", *options)

    assert 0 == result.exit_code, result.output


@pytest.mark.parametrize("algorithm", OWN)
def test_check_accepts_a_budget_that_is_large_enough_without_asking_the_optimizer(
    tmp_path: Path, algorithm: str
) -> None:
    result = check(tmp_path, algorithm, budget=500)

    assert 0 == result.exit_code, result.output
    assert "no problem found" in result.output
