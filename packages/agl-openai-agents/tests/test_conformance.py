"""The tracer passes the tests for all tracers, with an agent, a tool and a custom span."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from agents import Agent, Model, ModelResponse, Runner, Usage, custom_span, function_span, generation_span, trace
from openai.types.responses import ResponseOutputMessage, ResponseOutputText

from agl_openai_agents.tracer import OpenAIAgentsTracer
from agl_testing.conformance.tracer import Probe, TracerConformance, TracerScenario


class ProbeModel(Model):
    """A model that answers at once, and calls ``work`` where it would send a request."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        with generation_span(model="probe"):
            self._work()
        text = ResponseOutputText(text="done", type="output_text", annotations=[])
        message = ResponseOutputMessage(id="m", content=[text], role="assistant", status="completed", type="message")
        return ModelResponse(output=[message], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the probe does not stream")


async def with_agent(work: Callable[[], None]) -> None:
    await Runner.run(Agent(name="probe", model=ProbeModel(work)), "go")


async def with_spans(work: Callable[[], None]) -> None:
    with trace("workflow"), custom_span("step"), function_span("tool", input=json.dumps({})):
        work()


class TestOpenAIAgentsTracer(TracerConformance):
    @pytest.fixture(params=[with_agent, with_spans], ids=["agent", "spans"])
    def scenario(self, request: pytest.FixtureRequest) -> TracerScenario:
        play = request.param

        async def run(probe: Probe) -> None:
            await play(probe)

        async def fail(error: Exception) -> None:
            def work() -> None:
                raise error

            await play(work)

        return TracerScenario(tracer=OpenAIAgentsTracer(), run=run, fail=fail)


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the SDK's trace processors, which outside of rollouts would send traces to OpenAI."""
    from agents import set_trace_processors

    set_trace_processors([])
