"""The turns of an agent are exported as one conversation, so that no turn trains twice."""

from typing import Any

import pytest

from agl_data.export.dialogues import dialogues
from agl_langchain.tracer import LangChainTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import play

from . import agents
from .agents import asked


@pytest.mark.parametrize("name", ["helper", None])
def test_an_agents_turns_are_exported_as_one_dialogue(
    name: str | None, server: ScriptedModelServer, tracer: LangChainTracer
):
    def agent(task: Any, llm: Any) -> None:
        agents.agent(llm, [agents.weather], name=name).invoke(asked(task))

    (run,) = play(agent, server, tracer)
    assert 2 == len(run.calls)
    (line,) = dialogues(run.episode, run.spans)
    assert ["user", "assistant", "tool", "assistant"] == [message["role"] for message in line["messages"]]
