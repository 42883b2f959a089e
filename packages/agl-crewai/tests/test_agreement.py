"""A program's own model that bypasses the wire hook: the run reports the model's class, once for each call."""

from typing import Any

import openai
import pytest
from crewai import BaseLLM
from crewai.events import crewai_event_bus
from crewai.events.types.llm_events import LLMCallCompletedEvent, LLMCallStartedEvent, LLMCallType

from agl.schemas import LLM
from agl_crewai.tracer import CrewAITracer
from agl_testing.model_server import Reply, ScriptedModelServer

from . import agents
from .conftest import Play

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # CrewAI's own, of its own parts

ONE = [{"marker": "task-0;"}]


class Pigeon(BaseLLM):
    """A model that answers without HTTP."""

    def call(self, *args: Any, **options: Any) -> str:
        return "Final Answer: coo"

    async def acall(self, *args: Any, **options: Any) -> str:
        return self.call(*args, **options)


class ReportingPigeon(Pigeon):
    """A model that emits CrewAI's events for the call itself."""

    def call(self, *args: Any, **options: Any) -> str:
        about: Any = {"messages": "coo?", "model": self.model, "call_id": "c1"}
        crewai_event_bus.emit(self, LLMCallStartedEvent(**about))
        crewai_event_bus.emit(
            self, event=LLMCallCompletedEvent(**about, response="coo", call_type=LLMCallType.LLM_CALL)
        )
        return "Final Answer: coo"


class Relay(BaseLLM):
    """A model that answers through a client that uses httpx."""

    def call(self, messages: Any, *args: Any, **options: Any) -> str:
        with openai.OpenAI(base_url=self.base_url, api_key=self.api_key) as client:
            answer = client.chat.completions.create(model=self.model, messages=messages)
        return str(answer.choices[0].message.content)


def with_pigeon(task: Any, llm: LLM) -> str:
    return str(agents.crew_of(task, Pigeon(model="dove")).kickoff())


def half_seen(task: Any, llm: LLM) -> str:
    agents.blocking(task, llm)
    return with_pigeon(task, llm)


async def natively_async(task: Any, llm: LLM) -> str:
    return str(await agents.crew_of(task, Pigeon(model="dove")).akickoff())


def reporting(task: Any, llm: LLM) -> str:
    return str(agents.crew_of(task, ReportingPigeon(model="dove")).kickoff())


def relaying(task: Any, llm: LLM) -> str:
    relay = Relay(model=llm.model, base_url=llm.base_url, api_key=llm.api_key or "none")
    return str(agents.crew_of(task, relay).kickoff())


@pytest.fixture(autouse=True)
def answers(model_server: ScriptedModelServer) -> None:
    model_server.respond_with(lambda _: Reply(text="Final Answer: ok"))


def test_a_model_past_the_wire_is_named_and_nothing_of_the_rollout_trains(run: Play) -> None:
    (item,) = run(half_seen, ONE)
    (lost,) = item.episode.unseen
    assert ("writer", "dove") == (lost.agent, lost.model)
    assert lost.client.endswith(".Pigeon")
    assert ["unseen_calls"] == [call.reject for call in item.episode.transitions]


@pytest.mark.parametrize("agent", [with_pigeon, natively_async, reporting])
def test_a_call_past_the_wire_is_counted_once_however_it_is_made(run: Play, agent: Any) -> None:
    (item,) = run(agent, ONE)
    assert "succeeded" == item.outcome.status, item.outcome.error
    assert ["writer"] == [call.agent for call in item.episode.unseen]


def test_a_call_on_the_wire_is_not_counted_as_unseen(run: Play) -> None:
    (item,) = run(relaying, ONE)
    assert "succeeded" == item.outcome.status, item.outcome.error
    assert ((), ()) == (item.episode.unseen, item.episode.unattributed)
    assert ["office/letter/writer"] == ["/".join(call.path) for call in item.episode.transitions]


def test_classes_that_are_defined_later_are_watched_and_given_back() -> None:
    before, hook = vars(Pigeon)["call"], vars(BaseLLM).get("__init_subclass__")
    tracer = CrewAITracer()
    tracer.install()

    class Late(Pigeon):
        def call(self, *args: Any, **options: Any) -> str:
            return super().call(*args, **options)

    watched = vars(Late)["call"]
    tracer.uninstall()
    assert watched is not vars(Late)["call"]
    assert (before, hook) == (vars(Pigeon)["call"], vars(BaseLLM).get("__init_subclass__"))
