"""The OpenAI Agents SDK: what the tracer adds to a model call. No figures where it is not installed."""

import asyncio
from importlib.util import find_spec
from typing import Any

from benchmarks._adapters import overhead
from benchmarks._harness import Figure, component, table

_CALLS = 200
_FOUND = all(map(find_spec, ("agents", "agl_openai_agents")))


def figures(*, repeats: int) -> list[Figure]:
    """An agent that answers at once; the SDK traces in both cases, to nobody when bare."""
    from agents import Agent, Model, ModelResponse, Runner, Usage, generation_span, set_trace_processors
    from openai.types.responses import ResponseOutputMessage, ResponseOutputText

    class Ready(Model):
        async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
            with generation_span(model="ready"):
                text = ResponseOutputText(text="done", type="output_text", annotations=[])
            done = ResponseOutputMessage(id="m", content=[text], role="assistant", status="completed", type="message")
            return ModelResponse(output=[done], usage=Usage(), response_id=None)

        def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("the benchmark does not stream")

    set_trace_processors([])
    agent = Agent(name="helper", model=Ready())

    async def ask() -> None:
        for _ in range(_CALLS):
            await Runner.run(agent, "x " * 500)

    def calls() -> int:
        asyncio.run(ask())
        return _CALLS

    return [overhead("OpenAI Agents tracer per call", component("tracer", "openai-agents"), calls, repeats=repeats)]


def run(*, quick: bool) -> list[Figure]:
    """The figures, or none."""
    return figures(repeats=3 if quick else 9) if _FOUND else []


if __name__ == "__main__":
    print(table(run(quick=False)))
