"""Whole experiments on the stand-in: an algorithm publishes weights, servers load them, calls record the version."""

import asyncio
from typing import Any

import openai
import pytest

import agl
from agl import PluginManager
from agl.algorithms import algorithm
from agl.contracts import AlgorithmContext, RolloutQuery, StepReport
from agl.errors import ConfigError, PolicyError
from agl.schemas import Weights
from agl.stores import MemoryStore
from agl_run import Quiet, policy


async def write(task: Any, llm: agl.LLM) -> float:
    """Ask the model twice."""
    del task
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        for text in ("hi", "again"):
            messages: Any = [{"role": "user", "content": text}]
            await client.chat.completions.create(model=llm.model, messages=messages)
    return 1.0


class Publisher:
    """An algorithm that collects once per step, and then publishes the next of the given weights."""

    def __init__(self, weights: list[Weights]) -> None:
        self.weights, self.done = weights, 0

    async def setup(self, context: AlgorithmContext) -> None:
        self.context = context

    async def step(self) -> StepReport:
        step = self.done + 1
        await self.context.collect(self.context.train, step=step)
        await self.context.publish("main_llm", self.weights[self.done], step=step)
        self.done = step
        return StepReport(step=step, is_finished=step == len(self.weights))

    def state(self) -> dict[str, Any]:
        return {"done": self.done}

    async def restore(self, state: Any) -> None:
        self.done = state["done"]

    async def close(self) -> None:
        pass


class Stage:
    def __init__(self, folder: Any, base: Weights) -> None:
        self.folder, self.base, self.store = folder, base, MemoryStore()

    def trainer(self, weights: list[Weights], *, gateway: str = "auto", **settings: Any) -> agl.Trainer:
        plugins = PluginManager.from_environment()

        class Plugin:
            @agl.hookimpl
            def agl_algorithms(self) -> Any:
                yield agl.AlgorithmEntry(name="publisher", factory=lambda: Publisher(weights))

        plugins.register(Plugin(), name="publisher")
        served = policy("vllm", model=self.base.uri, dtype="float32", **settings)
        return agl.Trainer(
            name="small",
            algorithm=algorithm("publisher", tunes="main_llm"),
            policies={"main_llm": served},
            gateway=gateway,
            plugins=plugins,
            store=self.store,
            folder=self.folder,
            progress=Quiet(),
        )

    def calls(self) -> list[Any]:
        async def read() -> list[Any]:
            rollouts = await self.store.rollouts(RolloutQuery(experiment="small", limit=100))
            spans = [await self.store.spans(rollout.rollout_id) for rollout in sorted(rollouts, key=order)]
            return [span.call for of_one in spans for span in of_one if span.call is not None]

        def order(rollout: Any) -> Any:
            return rollout.metadata["step"]

        return asyncio.run(read())


TASKS = [{"n": number} for number in range(3)]


def test_a_run_over_two_servers_follows_its_adapters(base: Any, make_weights: Any, tmp_path: Any) -> None:
    stage = Stage(tmp_path, base)
    adapters = [make_weights(name, shift=shift, base=base) for name, shift in (("a1", 0.5), ("a2", 0.75))]
    result = stage.trainer(adapters, replicas=2, lora_rank=4).fit(write, TASKS)
    assert {"main_llm": "small-1-publisher-2"} == dict(result.resources)
    calls = stage.calls()
    assert 2 * len(TASKS) * 2 == len(calls) == len({call.request_id for call in calls})
    half = len(calls) // 2
    first, second = ({(call.model_version, call.logprobs) for call in part} for part in (calls[:half], calls[half:]))
    assert ([""], ["small-1-publisher-1"]) == ([v for v, _ in first], [v for v, _ in second])
    assert {"main_llm"} == {call.model for call in calls}
    assert all(call.response_ids and not call.ids_missing for call in calls)


def test_a_server_that_serves_other_weights_stops_the_run(
    base: Any, make_weights: Any, fake: Any, tmp_path: Any
) -> None:
    fake("reload-ignored")
    stage = Stage(tmp_path, base)
    weights = [make_weights(name, shift=shift) for name, shift in (("w1", 0.5), ("w2", 0.75))]
    with pytest.raises(PolicyError, match=r"log-probability -1\.4000 there and -1\.9000 by the weights"):
        stage.trainer(weights, sync="reload").fit(write, TASKS)
    assert 2 * len(TASKS) == len(stage.calls())


@pytest.mark.long
def test_what_only_the_gateway_can_do_is_refused_without_it(base: Any, make_weights: Any, tmp_path: Any) -> None:
    adapter = make_weights("a1", shift=0.5, base=base)
    with pytest.raises(ConfigError, match=r"'main_llm' has several servers, and only the gateway"):
        Stage(tmp_path, base).trainer([adapter], gateway="none", replicas=2).fit(write, TASKS)
    with pytest.raises(PolicyError, match=r"serves its new weights as 'main_llm-adapter' .*only the gateway"):
        Stage(tmp_path, base).trainer([adapter], gateway="none", lora_rank=4).fit(write, TASKS)
