"""The trainer's constructor: it builds the same experiment as a file, and its messages explain mistakes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agl
import agl_run
from agl import PluginManager, PromptTemplate
from agl.algorithms import algorithm, component
from agl.errors import ConfigError, PluginError
from agl.schemas import LLM, JsonResource
from agl_run import PolicyConfig, Quiet, RunnerConfig, ScheduleConfig, Trainer, load_config, parse_config

FILE = """
[experiment]
agent = "agent:solve"
name = "letters"
store = "memory://"
seed = 3
hidden = ["answer"]

[runner]
use = "process"
concurrency = 4
retry_on = ["failed"]
params = { setup = "agent:prepare" }

[policy.llm]
use = "torch"
model = "m"
aliases = ["gpt-*"]

[resource.prompt]
template = "Hello {name}"

[resource.limits]
value = { words = 3 }

[[algorithm]]
use = "grpo"
tunes = "llm"
credit = { use = "turn", params = { gamma = 0.9 } }
params = { optim = { lr = 0.1 } }

[[algorithm]]
use = "apo"
tunes = ["prompt"]
name = "late"
source = "grpo"

[schedule]
mode = "alternate"
every = 2
first = "grpo"

[[reward]]
use = "exact-match"

[gateway]
use = "none"
"""


def test_python_and_a_file_make_the_same_experiment(tmp_path: Path) -> None:
    (tmp_path / "letters.toml").write_text(FILE)
    trainer = Trainer(
        agent="agent:solve",
        name="letters",
        store="memory://",
        seed=3,
        hidden=("answer",),
        runner=agl_run.runner("process", concurrency=4, retry_on=("failed",), setup="agent:prepare"),
        policies={"llm": agl_run.policy("torch", aliases="gpt-*", model="m")},
        initial_resources={
            "prompt": PromptTemplate(template="Hello {name}"),
            "limits": JsonResource(value={"words": 3}),
        },
        algorithm=[
            agl.GRPO(tunes="llm", credit=component("turn", gamma=0.9), optim={"lr": 0.1}),
            algorithm("apo", tunes="prompt", name="late", source="grpo"),
        ],
        schedule=ScheduleConfig(mode="alternate", every=2, first=("grpo",)),
        rewards="exact-match",
        gateway="none",
    )
    config = load_config(tmp_path / "letters.toml")
    assert config == trainer.config
    assert config == Trainer.from_config(config).config


def test_names_alone_make_records() -> None:
    config = Trainer(
        algorithm="apo", runner="process", n_runners=2, policies={"judge": "openai"}, tracers="langchain", credit="turn"
    ).config
    assert (agl.APO(),) == config.algorithm
    assert RunnerConfig(use="process", concurrency=2) == config.runner
    assert {"judge": PolicyConfig(use="openai")} == config.policy
    assert (("langchain",), component("turn")) == (config.tracers, config.credit)


def test_adapter_says_whose_calls_train_where_the_algorithm_does_not() -> None:
    algorithms = [agl.GRPO(), agl.PPO(agents="judge")]
    config = Trainer(algorithm=algorithms, adapter={"agent_match": "write|rewrite"}).config
    assert ["write|rewrite", "judge"] == [one.agents for one in config.algorithm]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sead": 3}, "unknown argument 'sead'; did you mean 'seed'"),
        ({"n_workers": 4}, "unknown argument 'n_workers'; n_workers is n_runners: write n_runners=4"),
        ({"algorithms": ["apo"]}, "unknown argument 'algorithms'; did you mean 'algorithm'"),
        ({"seed": "three"}, 'experiment.seed is "three"; write a whole number'),
        ({"schedule": "paralel"}, 'schedule.mode is "paralel"; write one of sequential, alternate, concurrent'),
        ({"failed": "ignore"}, 'experiment.failed is "ignore"; write one of overflow, drop, penalise'),
        (
            {"runner": agl_run.runner(retry_on="lst")},
            r'runner.retry_on is \["lst"\]; write an array of failed or timeout',
        ),  # pyright: ignore[reportArgumentType]  # the slip
        ({"algorithm": agl.GRPO}, r"algorithm is <function GRPO.*call it, as in agl.GRPO\(...\)"),
        ({"algorithm": agl.GRPO(tunes=[3])}, r"algorithm.tunes is \[3\]; write an array of texts"),
        ({"algorithm": "apo", "adapter": {"agent_mach": "x"}}, "adapter has unknown keys .*it takes agent_match"),
        ({"initial_resources": {"prompt": "Go"}}, r"resource 'prompt' is 'Go'; write agl.PromptTemplate\(template"),
    ],
)
def test_slip_in_an_argument_is_named_with_its_remedy(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schedule": {"mode": "paralel"}},
            'schedule.mode is "paralel"; write one of sequential, alternate, concurrent',
        ),
        (
            {"algorithm": [{"use": "grpo", "lr": 0.1}]},
            r"unknown key 'algorithm.lr'; if lr is an argument of grpo, put it under params: params = \{ lr = 0.1 \}",
        ),
    ],
)
def test_slip_in_a_file_is_named_with_its_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"experiment": {"agent": "agent:solve"}, **changes})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "verll"}, "no algorithm is named 'verll'.*did you mean 'verl'.*pip install .*agl-algo-verl"),
        ({"algorithm": agl.VERL(tunes="x")}, "no algorithm is named 'verl'; run: pip install .*agl-algo-verl"),
        ({"runner": "proces"}, "no runner is named 'proces' .did you mean 'process'"),
        ({"credit": "episod"}, "no credit is named 'episod' .did you mean 'episode'"),
    ],
)
def test_unknown_component_is_named_with_the_next_step(arguments: dict[str, Any], message: str) -> None:
    trainer = Trainer(
        store="memory://", plugins=PluginManager.from_environment(disabled=["agl-algo-verl"]), **arguments
    )
    with pytest.raises(PluginError, match=message):
        trainer.plan(lambda task: 1.0, ["t"])


def test_model_among_the_policies_is_answered_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"policies\['main'\] is LLM\(.* belongs to initial_resources"):
        Trainer(policies={"main": LLM()})  # pyright: ignore[reportArgumentType]  # the slip


def test_section_may_be_a_table_as_in_the_file() -> None:
    config = Trainer(runner={"use": "process"}).config  # pyright: ignore[reportArgumentType]  # as a file has it
    assert "process" == config.runner.use
    with pytest.raises(ConfigError, match="gateway is 5; write a table"):
        Trainer(gateway=5)  # pyright: ignore[reportArgumentType]  # the slip


@pytest.mark.parametrize("method", ["fit", "dev"])
def test_blocking_call_within_an_async_program_names_the_method_to_await(method: str) -> None:
    trainer = Trainer(store="memory://", progress=Quiet())

    async def program() -> None:
        getattr(trainer, method)(lambda task: 1.0, ["t"])

    with pytest.raises(ConfigError, match=rf"await trainer\.{method}_async\("):
        asyncio.run(program())
