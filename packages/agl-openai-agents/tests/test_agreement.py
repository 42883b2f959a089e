"""A program's own model that bypasses the wire hook: the run reports the model's class, once for each call."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import Agent, Model, ModelResponse, Runner, Usage, generation_span
from openai.types.responses import Response, ResponseCompletedEvent, ResponseOutputMessage, ResponseOutputText

from agl_openai_agents.tracer import OpenAIAgentsTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import play

from . import programs
from .test_matrix import client_of


def message(text: str) -> ResponseOutputMessage:
    content = ResponseOutputText(text=text, type="output_text", annotations=[])
    return ResponseOutputMessage(id="m", content=[content], role="assistant", status="completed", type="message")


class Pigeon(Model):
    """A model that answers without HTTP."""

    model = "dove"

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        return ModelResponse(output=[message("coo")], usage=Usage(), response_id=None)

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        response = Response(
            id="r",
            created_at=0.0,
            model="dove",
            object="response",
            output=[message("coo")],
            parallel_tool_calls=False,
            tool_choice="auto",
            tools=[],
        )
        yield ResponseCompletedEvent(response=response, type="response.completed", sequence_number=0)


class ReportingPigeon(Pigeon):
    """A model that makes the SDK's span for the call itself."""

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        with generation_span(model="dove"):
            return ModelResponse(output=[message("coo")], usage=Usage(), response_id=None)


class Relay(Model):
    """A model that calls a model of the SDK, or a client that uses httpx."""

    def __init__(self, llm: Any, *, is_sdk: bool) -> None:
        self._llm = llm
        self._is_sdk = is_sdk

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        async with client_of(self._llm) as client:
            if self._is_sdk:
                return await programs.model_of(client).get_response(*args, **options)
            question: Any = args[1] if len(args) > 1 else options["input"]
            messages: Any = question if isinstance(question, list) else [{"role": "user", "content": question}]
            answer = await client.chat.completions.create(model="scripted", messages=messages)
        return ModelResponse(output=[message(str(answer.choices[0].message.content))], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("the relay does not stream")


async def half_seen(task: Any, llm: Any) -> None:
    async with client_of(llm) as client:
        await Runner.run(programs.helper(client), task["question"])
    await Runner.run(Agent(name="caller", model=Pigeon()), task["question"])


async def streamed(task: Any, llm: Any) -> None:
    await programs.stream(Agent(name="caller", model=Pigeon()), task["question"])


async def reporting(task: Any, llm: Any) -> None:
    await Runner.run(Agent(name="caller", model=ReportingPigeon()), task["question"])


async def by_httpx(task: Any, llm: Any) -> None:
    await Runner.run(Agent(name="caller", model=Relay(llm, is_sdk=False)), task["question"])


async def by_the_sdk(task: Any, llm: Any) -> None:
    await Runner.run(Agent(name="caller", model=Relay(llm, is_sdk=True)), task["question"])


@pytest.mark.parametrize("gateway", [False, True], ids=["wire", "gateway"])
def test_a_model_past_the_wire_is_named_and_nothing_of_the_rollout_trains(server: ScriptedModelServer, gateway: bool):
    (run,) = play(half_seen, server, OpenAIAgentsTracer(), gateway=gateway)
    (lost,) = run.episode.unseen
    assert ("caller", "dove") == (lost.agent, lost.model)
    assert lost.client.endswith(".Pigeon")
    assert ["unseen_calls"] == [call.reject for call in run.episode.transitions]
    assert () == run.episode.rows


@pytest.mark.parametrize("agent", [streamed, reporting])
def test_a_call_past_the_wire_is_counted_once_however_it_is_made(agent: Any, server: ScriptedModelServer):
    (run,) = play(agent, server, OpenAIAgentsTracer())
    assert run.attempt.error is None
    assert ["caller"] == [call.agent for call in run.episode.unseen]


@pytest.mark.parametrize("gateway", [False, True], ids=["wire", "gateway"])
@pytest.mark.parametrize("agent", [by_httpx, by_the_sdk])
def test_a_call_on_the_wire_is_not_counted_as_unseen(agent: Any, gateway: bool, server: ScriptedModelServer):
    (run,) = play(agent, server, OpenAIAgentsTracer(), gateway=gateway)
    assert ((), ()) == (run.episode.unseen, run.episode.unattributed)
    assert [("caller", "caller")] == run.who


def test_classes_that_are_defined_later_are_watched_and_given_back():
    first, second = OpenAIAgentsTracer(), OpenAIAgentsTracer()
    before = vars(Pigeon)["get_response"]
    first.install()
    second.install()

    class Late(Pigeon):
        async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
            return await super().get_response(*args, **options)

    assert hasattr(vars(Late)["get_response"], "__wrapped__")
    first.uninstall()
    second.uninstall()

    class TooLate(Late):
        async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
            return await super().get_response(*args, **options)

    assert [False, False] == [hasattr(vars(kind)["get_response"], "__wrapped__") for kind in (Late, TooLate)]
    assert before is vars(Pigeon)["get_response"]
