"""A run whose rollouts fail ends with the most frequent errors, an example and the next step."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agl import AlgorithmEntry, PluginManager, PromptTemplate, Trainer, hookimpl
from agl.contracts import AlgorithmContext, StepReport
from agl.errors import AglError, RunError
from agl_inspect.terminal.program import cli
from agl_run import Quiet
from agl_run.agents.importing import place_in

AGENT = """
import builtins

def solve(task):
    if task["do"].endswith("Error"):
        raise getattr(builtins, task["do"])("of its kind")
    if task["do"] == "raise":
        raise ValueError(f"no answer to question {task['n']}\\nfor a long reason")
    if task["do"] == "miss":
        raise KeyError("question")
    return None if task["do"] == "unrewarded" else 1.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tasks(*kinds: str) -> list[dict[str, Any]]:
    return [{"do": kind, "n": n} for n, kind in enumerate(kinds)]


def run(
    folder: Path,
    *,
    train: list[dict[str, Any]],
    val: list[dict[str, Any]],
    words: tuple[str, ...] = (),
    command: str = "run",
) -> Any:
    (folder / "failing_agent.py").write_text(AGENT)
    for name, data in (("train", train), ("val", val)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in data))
    (folder / "e.toml").write_text(
        '[experiment]\nname = "e"\nagent = "failing_agent:solve"\ntrain = "train.jsonl"\n'
        'store = "sqlite:///runs/e.db"\n' + ('val = "val.jsonl"\n' if val else "")
    )
    return CliRunner().invoke(cli, [command, str(folder / "e.toml"), *words])


def test_run_in_which_every_rollout_failed_ends_with_the_errors_and_the_next_step(tmp_path: Path) -> None:
    result = run(tmp_path, train=tasks("miss", "raise", "raise"), val=tasks("raise"))

    assert 1 == result.exit_code
    assert (
        "Error: none of 4 rollouts succeeded: ValueError: no answer to question 0 (3), KeyError: 'question' (1). "
        "Correct the agent or the reward, then run it again with --fresh (fresh=True). "
        "Look at one with: agl show e-1-validate-val-00000-00000-000\n"
    ) in result.output
    assert "for a long reason" not in result.output


@pytest.mark.parametrize(("kinds", "status"), [(("raise", "miss"), 1), (("raise", "work"), 0)])
def test_trial_in_which_every_rollout_failed_has_exit_status_1(
    tmp_path: Path, kinds: tuple[str, ...], status: int
) -> None:
    result = run(tmp_path, train=tasks(*kinds), val=[], command="dev")

    assert status == result.exit_code
    assert "ValueError: no answer to question 0" in result.output


def test_trial_names_the_line_of_the_agents_own_code_at_which_an_error_left_it(tmp_path: Path) -> None:
    agent = "import json\n\n\ndef solve(task):\n    return json.loads(task['do'])\n"
    (tmp_path / "parsing_agent.py").write_text(agent)
    changed = ("--set", "experiment.agent=parsing_agent:solve")
    result = run(tmp_path, train=tasks("raise"), val=[], words=changed, command="dev")

    assert "  json.decoder.JSONDecodeError: Expecting value" in result.output
    assert "  at parsing_agent.py:5\n" in result.output


def test_place_of_an_error_is_not_read_from_its_message(tmp_path: Path) -> None:
    frame, said = f'  File "{tmp_path}/agent.py", line 3, in solve', f'see File "{tmp_path}/data.py", line 7'
    assert "agent.py:3" == place_in(f"{frame}\nValueError: {said}\n", tmp_path)
    assert "agent.py:3" == place_in(f"  | {frame}\n  | ValueError: {said}\n", tmp_path)  # of an exception group


def test_run_whose_training_rollouts_all_failed_counts_as_failed(tmp_path: Path) -> None:
    result = run(tmp_path, train=tasks("raise", "raise"), val=tasks("work"))

    assert 1 == result.exit_code
    assert "none of 2 rollouts on training tasks succeeded: ValueError: no answer to question 0 (2)" in result.output


@pytest.mark.parametrize("word", ["--quiet", "--json"])
def test_run_with_some_failures_names_the_most_frequent_error(
    tmp_path: Path, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(tmp_path, train=tasks("miss", "raise", "work", "raise"), val=tasks("work"), words=(word,))

    assert 0 == result.exit_code, result.output
    assert [
        "3 of 5 rollouts failed, most often with ValueError: no answer to question 1 (2). "
        "Look at one with: agl show e-1-record-test-00001-00001-000"
    ] == [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]


def test_validation_counts_the_rollouts_without_a_reward(tmp_path: Path) -> None:
    result = run(tmp_path, train=tasks("work"), val=tasks("unrewarded", "work", "raise"))
    assert "validation reward after step 0: 0.333 (1 of 3 failed, 1 of 3 without a reward)\n" in result.output


def test_run_without_failures_says_nothing_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = run(tmp_path, train=tasks("work"), val=tasks("work"))

    assert 0 == result.exit_code, result.output
    assert "failed" not in caplog.text


def test_three_most_frequent_errors_are_named_and_the_others_counted(tmp_path: Path) -> None:
    kinds = ("OSError", "ValueError", "ValueError", "TypeError", "TypeError", "KeyError", "KeyError", "NameError")
    result = run(tmp_path, train=tasks(*kinds), val=[])

    named = "ValueError: of its kind (2), TypeError: of its kind (2), KeyError: 'of its kind' (2), other errors (2)."
    assert f"none of 8 rollouts succeeded: {named}" in result.output


def test_failed_run_can_be_started_again(tmp_path: Path) -> None:
    run(tmp_path, train=tasks("raise"), val=tasks("raise"))

    assert 0 == run(tmp_path, train=tasks("work"), val=tasks("work"), words=("--fresh",)).exit_code


class Collecting:
    """Collects the rollouts of one step, including the failed ones, and publishes nothing."""

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        await self._context.collect(self._context.train, step=1, keeps_all=True)
        return StepReport(step=1, is_finished=True, metrics={}, trained=())

    def state(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...


class CollectingPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [
            AlgorithmEntry(name="collecting", factory=Collecting, tunes=("prompt_template",), needs_token_ids=False)
        ]


def test_algorithm_that_keeps_failed_rollouts_does_not_hide_them(tmp_path: Path) -> None:
    manager = PluginManager.from_environment()
    manager.register(CollectingPlugin(), name="collecting")
    trainer = Trainer(
        algorithm="collecting",
        initial_resources={"prompt": PromptTemplate(template="Hello")},
        store="memory://",
        folder=tmp_path,
        plugins=manager,
        progress=Quiet(),
    )

    def fails(task: dict[str, Any], prompt: PromptTemplate) -> float:
        raise ValueError("no answer")

    with pytest.raises(RunError, match=r"none of 2 rollouts succeeded: ValueError: no answer \(2\)"):
        trainer.fit(fails, train_dataset=tasks("raise", "raise"))


class Untyped(Collecting):
    """Reports a step as a dict."""

    async def step(self) -> Any:
        return {"step": 1}


def test_algorithm_that_reports_no_step_report_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Collecting", Untyped)
    manager = PluginManager.from_environment()
    manager.register(CollectingPlugin(), name="collecting")
    trainer = Trainer(
        algorithm="collecting",
        initial_resources={"prompt": PromptTemplate(template="Hello")},
        store="memory://",
        folder=tmp_path,
        plugins=manager,
        progress=Quiet(),
    )

    with pytest.raises(AglError, match="algorithm 'collecting' returned dict from step"):
        trainer.fit(lambda task, prompt: 1.0, train_dataset=tasks("work"))
