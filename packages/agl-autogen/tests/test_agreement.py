"""A model client that bypasses the wire hook: the run reports the client's class."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ChatCompletionClient
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.replay import ReplayChatCompletionClient

from agl_autogen.tracer import AutoGenTracer
from agl_testing.model_server import ScriptedModelServer
from tests.adapters import play


class Pigeon(ReplayChatCompletionClient):
    """A model client that answers without HTTP; the class may be defined after the adapter was imported."""


async def half_seen(task: dict[str, Any], main_llm: Any) -> None:
    for name, client in (("caller", Pigeon(["coo"])), ("cached", ChatCompletionCache(Pigeon(["coo"])))):
        await AssistantAgent(name, model_client=client).run(task=task["marker"])


async def streamed(task: dict[str, Any], main_llm: Any) -> None:
    agent = AssistantAgent("caller", model_client=Pigeon(["coo coo"]), model_client_stream=True)
    assert [item async for item in agent.run_stream(task=task["marker"])]


def test_a_client_past_the_wire_is_named_once(model_server: ScriptedModelServer):
    (run,) = play(half_seen, [{"marker": "a"}], server=model_server, tracers=[AutoGenTracer()])
    assert ["caller", "cached"] == [call.agent for call in run.episode.unseen]
    assert all(call.client.endswith(".Pigeon") for call in run.episode.unseen)


def test_a_streamed_call_past_the_wire_is_named(model_server: ScriptedModelServer):
    (run,) = play(streamed, [{"marker": "a"}], server=model_server, tracers=[AutoGenTracer()])
    assert [True] == [call.client.endswith(".Pigeon") for call in run.episode.unseen]


def test_classes_that_are_defined_later_are_watched_and_given_back():
    tracer = AutoGenTracer()
    before = vars(ReplayChatCompletionClient)["create"]
    tracer.install()

    class Late(ReplayChatCompletionClient):
        async def create(self, *args: Any, **options: Any) -> Any:
            return await super().create(*args, **options)

    assert hasattr(vars(Late)["create"], "__wrapped__")
    tracer.uninstall()
    assert not hasattr(vars(Late)["create"], "__wrapped__")
    assert before is vars(ReplayChatCompletionClient)["create"]
    assert "__init_subclass__" not in vars(ChatCompletionClient)
