"""The parts of :mod:`worlds.prompts` that an experiment runs: its agent, reward, task model and server.

The agent is the same whether its model is a function in this process (fast, for benchmarks) or an endpoint that it
calls with the ``openai`` client (for tests of the whole way); with equal rollout ids both give equal answers.

    world = easy()
    with model_server(world, ScriptedOptimizer()) as server:
        trainer = agl.Trainer(rewards=(order_reward(world),), initial_resources=dict(world.seeds()), ...)
        trainer.fit(order_agent(world), world.train, world.val)
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

import agl
from agl import semconv
from agl.algorithms import ComponentConfig, component
from agl.schemas import LLM, Reward, Rollout, Span
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Step
from worlds.prompts import (
    PromptWorld,
    complete_order,
    is_brief,
    judge,
    obeyed_styles,
    order_text,
    prompt_name,
)
from worlds.prompts_optimizer import ScriptedOptimizer

__all__ = [
    "HIDDEN",
    "TASK_MODEL",
    "OrderAgent",
    "OrderReward",
    "asker",
    "filled",
    "model_server",
    "order_agent",
    "order_reward",
]

TASK_MODEL = "clerk"
HIDDEN = ("expected",)
"""Keys of a task that an experiment has to hide from the agent."""

Ask = Callable[[str, str], Awaitable[Mapping[str, str]]]
"""Calls the task model: from (prompt with the order, seed) to a style per field."""


@dataclass(frozen=True, kw_only=True)
class OrderAgent:
    """Lets every role in a task complete its fields and reports the answer as the object ``answer``.

    Attributes:
        world: World of the task model that answers in this process where no resource is an ``LLM``.
        latency_s: Seconds that each of these answers takes.
        fault: Called first in every rollout; what it raises fails the attempt.
    """

    world: PromptWorld
    latency_s: float = 0.0
    fault: Callable[[Rollout], None] | None = None

    async def rollout(self, task: Any, resources: Mapping[str, Any], rollout: Rollout) -> None:
        """Run one task; its answer is recorded as an object, and nothing is returned."""
        if self.fault is not None:
            self.fault(rollout)
        llms = [value for value in resources.values() if isinstance(value, LLM)]
        ask = asker(llms[0]) if llms else self._answer
        answer: dict[str, str] = {}
        is_short = False
        for role, fields in task["fields"].items():
            text = filled(resources[prompt_name(role)], order_text(task["order"], fields))
            is_short = is_short or is_brief(obeyed_styles(text))
            answer |= await ask(text, f"{rollout.rollout_id}|{role}")
        agl.emit_object({"fields": answer, "is_short": is_short}, name="answer")

    async def _answer(self, text: str, seed: str) -> Mapping[str, str]:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        return complete_order(text, world=self.world, seed=seed)


def order_agent(
    world: PromptWorld, *, latency_s: float = 0.0, fault: Callable[[Rollout], None] | None = None
) -> OrderAgent:
    """Return the world's agent."""
    return OrderAgent(world=world, latency_s=latency_s, fault=fault)


class OrderReward:
    """Scores the reported answer and says what is wrong with it.

    Args:
        world: The world's fields as plain data, as they stand in an experiment file.
    """

    def __init__(self, *, world: Mapping[str, Any]) -> None:
        self._world = msgspec.convert(world, PromptWorld)

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward | None:
        """Return the reward, with feedback; ``None`` when the agent reported no answer."""
        reported = [span.attributes[semconv.OBJECT] for span in spans if span.name == "object answer"]
        if not reported:
            return None
        score, feedback = judge(
            self._world,
            rollout.task,
            reported[-1]["fields"],
            is_short=reported[-1]["is_short"],
            seed=rollout.rollout_id,
        )
        return Reward(value=score, source="evaluator", feedback=feedback)


def order_reward(world: PromptWorld) -> ComponentConfig:
    """The reward as ``agl.Trainer(rewards=...)`` takes it."""
    plain = cast("dict[str, Any]", msgspec.to_builtins(world))
    return component("worlds.prompts_run:OrderReward", world=plain)


def filled(prompt: Any, order: str) -> str:
    """Return the prompt with the order filled in, or appended where the engine has no placeholders.

    Of a prompt of several messages it is the text of all of them, in which the assistant's stand as outputs.
    """
    if isinstance(prompt, list):
        messages = cast("Any", prompt).format(order=order)
        heads = {"assistant": "Output: "}
        return "\n".join(heads.get(message["role"], "") + message["content"] for message in messages)
    return f"{prompt.template}\n{order}" if prompt.engine == "plain" else prompt.format(order=order)


def asker(llm: LLM) -> Ask:
    """Return a function that calls the task model at an endpoint, with the ``openai`` client."""
    import openai  # only where there is an endpoint

    async def ask(text: str, seed: str) -> Mapping[str, str]:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
            answer = await client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": text}], user=seed
            )
        return json.loads(answer.choices[0].message.content or "{}")

    return ask


def model_server(world: PromptWorld, optimizer: ScriptedOptimizer | None = None) -> ScriptedModelServer:
    """Return a server for the task model, under the name ``clerk``, and for the optimiser, under every other name."""
    scripted = optimizer or ScriptedOptimizer(memorises=world.memorises)

    def respond(request: ModelRequest) -> Step:
        if request.body.get("model") != TASK_MODEL:
            return scripted.respond(request)
        seed = str(request.body.get("user", request.index))
        return Reply(text=json.dumps(complete_order(request.last_text, world=world, seed=seed)))

    return ScriptedModelServer(respond=respond, models=(TASK_MODEL, "critic", "editor"))
