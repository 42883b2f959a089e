"""``agl check --forecast``: its trial runs until the tokens are certain or time is up; costs on a named device."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("httpx")

from agl import AlgorithmEntry, PluginManager, PromptTemplate, Trainer, hookimpl
from agl.contracts import AlgorithmContext
from agl_inspect.forecast.fitting import VERL
from agl_inspect.terminal.program import cli
from agl_run.forecast.step_size import run_size_of, settable_of
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer

AGENT = """
import httpx

def solve(task, main):
    body = {"model": main.model, "messages": [{"role": "user", "content": "word " * task["n"]}]}
    httpx.post(f"{main.endpoint}/chat/completions", json=body, verify=False).raise_for_status()
    return 1.0
"""
EXPERIMENT = """
[experiment]
name = "sized"
agent = "plan_cli_agent:solve"
store = "sqlite:///sized.db"
train = "tasks.jsonl"

[policy.main]
use = "openai"
model = "scripted"
base_url = "{url}"
api_key_env = ""
"""
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "intermediate_size": 128,
}


def reply(request: ModelRequest) -> Reply:
    return Reply(text="yes " * len(request.last_text.split()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    (tmp_path / "plan_cli_agent.py").write_text(AGENT)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with ScriptedModelServer(respond=reply) as server:
        (tmp_path / "sized.toml").write_text(EXPERIMENT.format(url=server.base_url))
        yield tmp_path
    sys.modules.pop("plan_cli_agent", None)


def tasks(folder: Path, *lengths: int) -> None:
    (folder / "tasks.jsonl").write_text("".join(f'{{"n": {n}, "at": {at}}}\n' for at, n in enumerate(lengths)))


def plan(*words: str) -> Result:
    return CliRunner().invoke(cli, ["check", "--forecast", "sized.toml", *words], catch_exceptions=False)


def trial_of(*words: str) -> tuple[int, float]:
    """Return the number of tasks in the trial, and the uncertainty of its tokens."""
    found = plan("--run", "--json", *words)
    assert 0 == found.exit_code, found.output
    report = json.loads(found.stdout)
    return report["source"]["tasks"], report["algorithms"][0]["uncertainty"]


@pytest.mark.long
def test_trial_takes_further_tasks_until_the_tokens_are_sure(folder: Path) -> None:
    tasks(folder, *[10, 16] * 50)

    ran, unsure = trial_of()

    assert 8 < ran < 100
    assert unsure <= 0.05


def test_trial_of_tasks_that_are_alike_stays_small(folder: Path) -> None:
    tasks(folder, *[10] * 40)

    assert (8, 0.0) == trial_of()


@pytest.mark.long
def test_trial_ends_with_the_tasks_or_the_time_or_at_the_size_that_was_asked_for(folder: Path) -> None:
    tasks(folder, *[4, 120] * 8)

    assert 16 == trial_of()[0]
    assert 8 == trial_of("--seconds", "0")[0]
    assert 3 == trial_of("--tasks", "3")[0]


def test_plan_says_how_sure_it_is_and_reads_the_trial_again(folder: Path) -> None:
    tasks(folder, *[10, 16] * 50)
    first, again = plan("--seconds", "0"), plan()

    assert "running 16 rollouts (8 tasks x 2)" in first.stderr
    assert "" == again.stderr
    assert "16 rollouts of 8 tasks, from a trial" in again.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "7B"), "--model '7B' says nothing without a device"),
        (("--device", "h1000"), "--device 'h1000' is not in the table"),
        (("--device", "h100"), "--device h100 needs --model"),
        (("--device", "h100", "--model", "nowhere"), "neither a file or folder here nor a size"),
    ],
)
def test_device_and_model_are_checked_before_anything_runs(folder: Path, words: tuple[str, ...], message: str) -> None:
    tasks(folder, 1)
    found = plan(*words)

    assert 1 == found.exit_code
    assert message in found.stderr
    assert not (folder / "sized.db").exists()


def test_device_without_an_algorithm_on_tokens_is_left_out(folder: Path) -> None:
    tasks(folder, *[10] * 9)
    found = plan("--device", "h100", "--model", "config.json", "--json")

    assert json.loads(found.stdout)["algorithms"][0]["on_device"] is None


@pytest.mark.parametrize(("algorithm", "has_verl"), [("grpo", True), ("dpo", False), ("sft", False)])
def test_proposals_name_verl_only_for_policy_gradients_on_rewards(
    algorithm: str, has_verl: bool, tmp_path: Path
) -> None:
    pytest.importorskip("agl_algo_torch")
    trainer = Trainer(algorithm=algorithm, policies={"main": "torch"}, folder=tmp_path)
    made = trainer.plan(lambda task: 1.0, ["t"])

    found = settable_of(made, made.config.algorithm[0])

    assert has_verl == (VERL in found)
    assert "lora.is_quantized" in found


class Waiting:
    """An algorithm that knows the size of its run only while the experiment runs."""

    def run_size(self, context: AlgorithmContext) -> tuple[int, int]:
        return len(context.endpoint("main").model), 1

    async def setup(self, context: AlgorithmContext) -> None: ...

    async def step(self) -> None: ...

    def state(self) -> None: ...

    async def restore(self, state: object) -> None: ...

    async def close(self) -> None: ...


class WaitingPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [AlgorithmEntry(name="waiting", factory=Waiting, tunes=("prompt_template",))]


def test_size_of_a_run_that_only_the_running_experiment_knows_is_left_open(tmp_path: Path) -> None:
    manager = PluginManager.from_environment()
    manager.register(WaitingPlugin(), name="waiting")
    trainer = Trainer(
        algorithm="waiting",
        initial_resources={"prompt": PromptTemplate(template="a")},
        folder=tmp_path,
        plugins=manager,
    )
    plan = trainer.plan(lambda task: 1.0, ["t"])
    assert (0, 0) == asyncio.run(run_size_of(plan, plan.config.algorithm[0]))
