"""AutoGen: what the tracer adds to a model call. No figures where it is not installed."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from benchmarks._adapters import overhead
from benchmarks._harness import Figure, component, table

_CALLS = 100
_FOUND = all(map(find_spec, ("autogen_agentchat", "autogen_ext", "agl_autogen")))


def figures(*, repeats: int) -> list[Figure]:
    """An agent, and a team of two, that a model answers at once."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core.model_context import BufferedChatCompletionContext
    from autogen_core.models import ModelInfo
    from autogen_ext.models.replay import ReplayChatCompletionClient

    os.environ.update(
        component("tracer", "autogen").worker_env()
    )  # in both cases no spans of the runtime, which would be saved
    info = ModelInfo(vision=False, function_calling=True, json_output=False, family="any", structured_output=False)

    def agent(name: str) -> AssistantAgent:
        model = ReplayChatCompletionClient(["done"] * (_CALLS + 1), model_info=info)
        return AssistantAgent(name, model_client=model, model_context=BufferedChatCompletionContext(buffer_size=2))

    async def ask() -> None:
        helper = agent("helper")
        for _ in range(_CALLS):
            await helper.run(task="x " * 500)

    async def discuss() -> None:
        for _ in range(_CALLS // 10):
            team = RoundRobinGroupChat(
                [agent("writer"), agent("critic")], termination_condition=MaxMessageTermination(11)
            )
            await team.run(task="x " * 500)

    def agents() -> int:
        asyncio.run(ask())
        return _CALLS

    def teams() -> int:
        asyncio.run(discuss())
        return _CALLS

    return [
        overhead(
            f"AutoGen tracer per call, {name}",
            component("tracer", "autogen"),
            work,
            repeats=repeats,
            bare=partial(unrecorded, work),
        )
        for name, work in (("an agent", agents), ("a team", teams))
    ]


def unrecorded(work: Callable[[], int]) -> int:
    """``work`` as without OpenTelemetry's SDK: a provider cannot be taken away, but told to record nothing."""
    from opentelemetry import context, trace

    off = trace.SpanContext(trace_id=1, span_id=1, is_remote=False, trace_flags=trace.TraceFlags(0))
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(off)))
    try:
        return work()
    finally:
        context.detach(token)


def run(*, quick: bool) -> list[Figure]:
    """The figures, or none."""
    return figures(repeats=3 if quick else 9) if _FOUND else []


if __name__ == "__main__":
    print(table(run(quick=False)))
