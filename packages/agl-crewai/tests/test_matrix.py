"""CrewAI under the async runner, its calls recorded in the process and by the gateway.

===================  =====================================================================================
cell                 test
===================  =====================================================================================
sync                 ``test_one_crew[blocking]``
async                ``test_one_crew[in_a_thread]``, ``test_one_crew[natively_async]``
stream               ``test_streamed_answers``
tool                 ``test_tools_of_an_agent``, ``test_failed_tool_is_an_error_and_the_agent_goes_on``
parallel tools       ``test_tools_of_one_answer``
hand-off             ``test_delegation_is_a_handoff``
sub-agent            the same: CrewAI's sub-agent is a coworker; also ``test_tasks_at_once``
retry 429 and 500    ``test_retries_are_one_call``
exception            ``test_exceptions_arrive_unchanged``, ``test_the_agents_own_exception_arrives_unchanged``
names in the path    ``test_path_names_crews_flows_and_tasks``
thread               ``test_model_call_in_a_tool``, ``test_tasks_at_once``, whose tasks are threads
8 rollouts at once   ``test_rollouts_at_once_keep_apart``, for every agent above
===================  =====================================================================================

No cell is impossible.
"""

from collections.abc import Callable
from typing import Any

import pytest

from agl import semconv
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Status, Step, ToolCall
from tests.adapters import check_rollouts

from . import agents
from .conftest import Play

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # CrewAI's own, of its own parts

ONE = [{"marker": "task-0;"}]
MANY = [{"marker": f"task-{number};"} for number in range(8)]
CREW = ["invoke_workflow office", "invoke_task letter", "invoke_agent writer"]


def tools_then(*calls: ToolCall) -> Callable[[ModelRequest], Step]:
    """Script a model that calls the tools once, and then answers."""

    def respond(request: ModelRequest) -> Step:
        is_first = not any(turn.role in ("assistant", "tool") for turn in request.turns)
        return Reply(tool_calls=calls) if is_first and request.body.get("tools") else Reply(text="Final Answer: ok")

    return respond


def delegate(request: ModelRequest) -> Step:
    """Script a writer that asks the researcher for the data named in the writer's task."""
    marker = request.last_text.partition("task-")[2].partition(";")[0]
    arguments = {"task": f"task-{marker};", "context": "none", "coworker": "researcher"}
    return tools_then(ToolCall("delegate_work_to_coworker", arguments))(request)


SUM = tools_then(ToolCall("add", {"a": 1, "b": 2}))

CASES: dict[str, tuple[Any, Callable[[ModelRequest], Step], list[str]]] = {
    "blocking": (agents.blocking, tools_then(), ["writer"]),
    "in_a_thread": (agents.in_a_thread, tools_then(), ["writer"]),
    "natively_async": (agents.natively_async, tools_then(), ["writer"]),
    "streaming": (agents.streaming, SUM, ["writer", "writer"]),
    "tool": (agents.with_tools, SUM, ["writer", "writer"]),
    "delegation": (agents.delegating, delegate, ["writer", "researcher", "writer"]),
    "sequence": (agents.in_sequence, tools_then(), ["writer", "editor"]),
    "alone": (agents.alone, tools_then(), ["writer"]),
    "flow": (agents.flowing, tools_then(), ["draft", "writer"]),
    "thread": (agents.model_call_in_a_tool, tools_then(ToolCall("ask", {"question": "why"})), ["writer"] * 3),
}


@pytest.mark.parametrize("case", ["blocking", "in_a_thread", "natively_async"])
def test_one_crew(run: Play, model_server: ScriptedModelServer, case: str) -> None:
    agent, respond, expected = CASES[case]
    model_server.respond_with(respond)
    (item,) = run(agent, ONE)
    assert ("succeeded", expected) == (item.outcome.status, item.agents), item.outcome.error
    check_rollouts([item], model_server)
    (call,) = item.calls
    assert [*CREW, "invoke_workflow AgentExecutor", "chat scripted", "chat scripted"] == item.path_of(call)
    assert {"ok"} == {span.status for span in item.spans}


@pytest.mark.parametrize(
    ("case", "paths"),
    [
        ("sequence", ["office/writer work/writer", "office/editor work/editor"]),
        ("alone", ["writer"]),
        ("flow", ["Letters/draft", "Letters/polish/office/letter/writer"]),
    ],
)
def test_path_names_crews_flows_and_tasks(
    run: Play, model_server: ScriptedModelServer, case: str, paths: list[str]
) -> None:
    agent, respond, expected = CASES[case]
    model_server.respond_with(respond)
    (item,) = run(agent, ONE)
    assert paths == ["/".join(call.path) for call in item.episode.transitions]
    assert expected == item.agents


def test_tools_of_an_agent(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(SUM)
    (item,) = run(agents.with_tools, ONE)
    check_rollouts([item], model_server)
    (tool,) = item.named("execute_tool add")
    assert CREW == item.path_of(tool)[:3]
    assert ({"a": 1, "b": 2}, "3") == (
        tool.attributes[semconv.TOOL_ARGUMENTS],
        str(tool.attributes[semconv.TOOL_RESULT]),
    )
    assert "ok" == tool.status


def test_failed_tool_is_an_error_and_the_agent_goes_on(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(tools_then(ToolCall("divide", {"a": 1, "b": 0})))
    (item,) = run(agents.with_tools, ONE)
    check_rollouts([item], model_server)
    assert "succeeded" == item.outcome.status
    assert {"error"} == {tool.status for tool in item.named("execute_tool divide")}
    assert all("division by zero" in tool.status_message for tool in item.named("execute_tool divide"))


def test_tools_of_one_answer(run: Play, model_server: ScriptedModelServer) -> None:
    calls = (ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4}), ToolCall("divide", {"a": 1, "b": 2}))
    model_server.respond_with(tools_then(*calls))
    (item,) = run(agents.with_tools, ONE)
    check_rollouts([item], model_server)
    tools = [span for span in item.spans if span.name.startswith("execute_tool")]
    found = sorted((str(span.attributes[semconv.TOOL_RESULT]), span.status) for span in tools)
    assert [("0.5", "ok"), ("3", "ok"), ("7", "ok")] == found


def test_streamed_answers(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(SUM)
    (item,) = run(agents.streaming, ONE)
    assert ("succeeded", ["writer", "writer"]) == (item.outcome.status, item.agents)
    assert all(span.call is not None and span.call.is_streamed for span in item.calls)
    check_rollouts([item], model_server)


def test_delegation_is_a_handoff(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(delegate)
    (item,) = run(agents.delegating, ONE)
    check_rollouts([item], model_server)
    assert ["writer", "researcher", "writer"] == item.agents
    (tool,) = item.named("execute_tool delegate_work_to_coworker")
    ends = (tool.attributes[semconv.HANDOFF_SOURCE], tool.attributes[semconv.HANDOFF_TARGET])
    assert (("writer", "researcher"), "ok") == (ends, tool.status)
    (helper,) = item.named("invoke_agent researcher")
    assert tool.span_id == helper.parent_id


def test_tasks_at_once(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(lambda _: Reply(text="Final Answer: ok", delay=0.05))
    (item,) = run(agents.at_once, ONE)
    assert "succeeded" == item.outcome.status
    assert ["green", "last", "red"] == sorted(item.agents)
    check_rollouts([item], model_server)


def test_methods_of_a_flow_are_nodes(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(tools_then())
    (item,) = run(agents.flowing, ONE)
    assert ["draft", "writer"] == item.agents
    check_rollouts([item], model_server)
    assert ["invoke_workflow Letters", "invoke_node polish", *CREW] == item.path_of(item.calls[1])[:5]


def test_model_call_in_a_tool(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(CASES["thread"][1])
    (item,) = run(agents.model_call_in_a_tool, ONE)
    check_rollouts([item], model_server)
    assert ["execute_tool ask", "chat scripted"] == item.path_of(item.calls[1])[-2:]


def test_spans_of_others_around_and_within_a_crew_make_one_tree(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(CASES["thread"][1])
    (item,) = run(agents.between_foreign_spans, ONE)
    check_rollouts([item], model_server)
    first, second, third = (item.path_of(call) for call in item.calls)
    crew = ["outer", *CREW, "invoke_workflow AgentExecutor"]
    assert [*crew, "chat scripted", "chat scripted"] == first == third
    assert [*crew, "execute_tool ask", "inner", "chat scripted"] == second


@pytest.mark.parametrize("code", [429, 500])
def test_retries_are_one_call(run: Play, model_server: ScriptedModelServer, code: int) -> None:
    model_server.enqueue(Status(code=code, retry_after=0.01), Reply(text="Final Answer: at last"))
    (item,) = run(agents.blocking, ONE)
    assert ("succeeded", [code, 200]) == (item.outcome.status, [call.status for call in model_server.calls])
    check_rollouts([item], model_server)
    assert (["writer"], 1) == (item.agents, len(item.failed_calls))
    assert ["superseded", ""] == [call.reject for call in item.episode.transitions]


def test_exceptions_arrive_unchanged(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(lambda _: Status(code=400, message="no such thing"))
    (item,) = run(agents.blocking, ONE)
    error = item.outcome.error
    assert error is not None
    assert ("failed", "openai.BadRequestError") == (item.outcome.status, error.type)
    assert "no such thing" in error.message
    assert {"error"} == {span.status for span in item.spans}
    assert item.named("invoke_agent writer")
    check_rollouts([item], model_server)


def test_the_agents_own_exception_arrives_unchanged(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(tools_then())
    (item,) = run(agents.raising, ONE)
    error = item.outcome.error
    assert error is not None
    assert (True, "task-0;") == (error.type.endswith("agents.StoppedError"), error.message)
    check_rollouts([item], model_server)


@pytest.mark.parametrize("case", CASES)
def test_rollouts_at_once_keep_apart(run: Play, model_server: ScriptedModelServer, case: str) -> None:
    agent, respond, expected = CASES[case]
    model_server.respond_with(respond)
    played = run(agent, MANY)
    assert ["succeeded"] * 8 == [item.outcome.status for item in played]
    assert [expected] * 8 == [item.agents for item in played]
    check_rollouts(played, model_server)
    shapes = {tuple(sorted(tuple(item.path_of(span)) for span in item.spans)) for item in played}
    assert 1 == len(shapes)
