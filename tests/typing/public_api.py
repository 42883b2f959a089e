"""Type checkers see the types of lazy names through ``import agl`` and ``import agl_run``."""

from typing import assert_type

import agl
import agl_run
from agl import PluginManager, RewardEntry, Rollout, StoreEntry, TracerEntry
from agl.algorithms import AlgorithmConfig, ComponentConfig, algorithm, component
from agl.contracts import StepReport
from agl.schemas import RolloutStatus


def entries(manager: PluginManager) -> None:
    assert_type(manager.tracer("otel"), TracerEntry)
    assert_type(manager.store_entry("sqlite"), StoreEntry)
    assert_type(manager.reward("exact-match"), RewardEntry)


def configuration() -> None:
    assert_type(agl.VERL({"trainer": {}}), AlgorithmConfig)
    assert_type(agl.GRPO(tunes="main_llm", optim={"lr": 1e-5}), AlgorithmConfig)
    assert_type(algorithm("rft", source="grpo").source, tuple[str, ...])
    assert_type(component("turn", gamma=0.9), ComponentConfig)
    assert_type(agl_run.policy("torch", model="m"), agl_run.PolicyConfig)
    assert_type(agl_run.runner("process", concurrency=4), agl_run.RunnerConfig)


def training(config: agl_run.ExperimentConfig) -> None:
    trainer = agl.Trainer(
        algorithm=[agl.GRPO(tunes="writer"), "apo"],
        policies={"writer": agl_run.policy("torch", model="m"), "judge": "openai"},
        runner=agl_run.runner("process"),
        credit=component("turn"),
        rewards=["exact-match", component("judge", model="judge")],
        schedule=agl_run.ScheduleConfig(mode="alternate"),
    )
    assert_type(trainer, agl_run.Trainer)
    assert_type(agl.Trainer.from_config(config), agl_run.Trainer)
    assert_type(trainer.fit(agents, train_dataset=[1, 2]), agl_run.FitResult)
    assert_type(trainer.dev("agent:solve", "tasks.jsonl", tasks=1), agl_run.DevResult)
    assert_type(trainer.fit(["solve", "{task}"]).before, float | None)


async def training_beside_a_program(trainer: agl.Trainer) -> None:
    assert_type(await trainer.fit_async(agents, val_dataset=[{}]), agl_run.FitResult)
    assert_type(await trainer.dev_async(agents), agl_run.DevResult)


def values(rollout: Rollout) -> None:
    assert_type(agl.Rollout(rollout_id="r", task=1), Rollout)
    assert_type(rollout.is_finished, bool)
    assert_type(rollout.status, RolloutStatus)


def agents() -> None:
    @agl.agent
    def solve(task: str) -> float:
        return float(task)

    assert_type(solve("1"), float)


class Plugin:
    @agl.hookimpl
    def agl_step_finished(self, report: StepReport) -> None:
        assert_type(report.metrics, dict[str, float])
