"""AutoGen under the async runner, its calls recorded in the process and by the gateway.

===================  =====================================================================================
cell                 test
===================  =====================================================================================
sync                 ``test_agent_that_blocks_a_thread``; AutoGen itself is async, a sync agent runs its own loop
async                ``test_one_agent``
stream               ``test_streamed_answers``
no run, read apart   ``test_agents_apart_from_each_other_are_not_within_each_other``
tool                 ``test_tools_of_an_agent``, ``test_failed_tool_is_an_error_and_the_agent_goes_on``
parallel tools       ``test_parallel_tools``
hand-off             ``test_handoff_in_a_swarm``
sub-agent            ``test_agent_as_a_tool``
retry 429 and 500    ``test_retries_are_one_call``
exception            ``test_exceptions_arrive_unchanged``, ``test_the_agents_own_exception_arrives_unchanged``
names in the path    ``test_path_names_the_team``
thread               ``test_model_call_in_a_threads_tool``
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

ONE = [{"marker": "task-0"}]
MANY = [{"marker": f"task-{number};"} for number in range(8)]


def tools_then(text: str, *calls: ToolCall) -> Callable[[ModelRequest], Step]:
    """Script a model that calls the tools once, and then says ``text``."""

    def respond(request: ModelRequest) -> Step:
        is_first = not any(turn.role in ("assistant", "tool") for turn in request.turns)
        return Reply(tool_calls=calls) if is_first and request.body.get("tools") else Reply(text=text)

    return respond


def select(request: ModelRequest) -> Step:
    """Answer as the selector and as the agents: first red is selected, then green, which is the only agent left."""
    if "select the next role" in str(request.body):
        return Reply(text="red")
    return Reply(text="DONE" if "hello from" in str(request.body) else "hello from red")


CASES: dict[str, tuple[Any, Callable[[ModelRequest], Step], list[str]]] = {
    "plain": (agents.plain, tools_then("hi"), ["calc"]),
    "blocking": (agents.blocking, tools_then("hi"), ["calc"]),
    "streaming": (agents.streaming, tools_then("3", ToolCall("add", {"a": 1, "b": 2})), ["calc"] * 2),
    "direct": (agents.asked_directly, tools_then("hi"), ["calc", "check"]),
    "between": (agents.read_in_between, tools_then("hi"), ["calc", "check"]),
    "tool": (agents.with_tools, tools_then("3", ToolCall("add", {"a": 1, "b": 2})), ["calc"] * 2),
    "handoff": (agents.handing_off, tools_then("DONE", ToolCall("go_on")), ["triage", "writer"]),
    "sub-agent": (
        agents.agent_as_tool,
        tools_then("ok", ToolCall("helper", {"task": "task"})),
        ["calc", "helper", "calc"],
    ),
    "thread": (agents.model_call_in_a_tool, tools_then("ok", ToolCall("ask", {"question": "why"})), ["calc"] * 3),
    "selector": (agents.selecting, select, ["SelectorGroupChatManager", "red", "green"]),
    "teams": (agents.team_in_a_team, tools_then("hello"), ["red", "green"]),
    "core": (agents.on_the_core_alone, tools_then("ok"), ["thinker"]),
}


def test_one_agent(run: Play, model_server: ScriptedModelServer) -> None:
    (item,) = run(agents.plain, ONE)
    assert ("succeeded", ["calc"]) == (item.outcome.status, item.agents)
    check_rollouts([item], model_server)
    (call,) = item.calls
    assert ["invoke_agent calc", "chat scripted"] == item.path_of(call)


@pytest.mark.parametrize("agent", [agents.asked_directly, agents.read_in_between])
def test_agents_apart_from_each_other_are_not_within_each_other(
    run: Play, model_server: ScriptedModelServer, agent: Any
) -> None:
    (item,) = run(agent, ONE)
    assert "succeeded" == item.outcome.status
    check_rollouts([item], model_server)
    paths = [item.path_of(call) for call in item.calls]
    assert [["invoke_agent calc", "chat scripted"], ["invoke_agent check", "chat scripted"]] == paths


def test_agent_that_blocks_a_thread(run: Play, model_server: ScriptedModelServer) -> None:
    (item,) = run(agents.blocking, ONE)
    assert ("succeeded", ["calc"]) == (item.outcome.status, item.agents)
    check_rollouts([item], model_server)


def test_tools_of_an_agent(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(CASES["tool"][1])
    (item,) = run(agents.with_tools, ONE)
    check_rollouts([item], model_server)
    (tool,) = item.named("execute_tool add")
    assert ["invoke_agent calc", "execute_tool add"] == item.path_of(tool)
    assert ({"a": 1, "b": 2}, "3") == (tool.attributes[semconv.TOOL_ARGUMENTS], tool.attributes[semconv.TOOL_RESULT])
    assert tool.status != "error"


def test_failed_tool_is_an_error_and_the_agent_goes_on(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(tools_then("sorry", ToolCall("divide", {"a": 1, "b": 0})))
    (item,) = run(agents.with_tools, ONE)
    check_rollouts([item], model_server)
    (tool,) = item.named("execute_tool divide")
    assert ("succeeded", "error", "ZeroDivisionError") == (
        item.outcome.status,
        tool.status,
        tool.attributes[semconv.ERROR_TYPE],
    )


def test_parallel_tools(run: Play, model_server: ScriptedModelServer) -> None:
    calls = (ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4}), ToolCall("divide", {"a": 1, "b": 0}))
    model_server.respond_with(tools_then("done", *calls))
    (item,) = run(agents.with_tools, ONE)
    check_rollouts([item], model_server)
    tools = [span for span in item.spans if span.name.startswith("execute_tool")]
    found = sorted((span.attributes.get(semconv.TOOL_RESULT, ""), span.status) for span in tools)
    assert [("", "error"), ("3", "unset"), ("7", "unset")] == found


def test_streamed_answers(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(CASES["streaming"][1])
    (item,) = run(agents.streaming, ONE)
    assert ("succeeded", ["calc", "calc"]) == (item.outcome.status, item.agents)
    assert all(span.call is not None and span.call.is_streamed for span in item.calls)
    check_rollouts([item], model_server)


def test_handoff_in_a_swarm(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(CASES["handoff"][1])
    (item,) = run(agents.handing_off, ONE)
    check_rollouts([item], model_server)
    (triage,) = item.named("invoke_agent triage")
    assert ("triage", "writer") == (triage.attributes["agl.handoff.source"], triage.attributes["agl.handoff.target"])
    assert [] == [span.name for span in item.spans if span.status == "error"]
    assert ["invoke_workflow Swarm", "invoke_agent writer", "chat scripted"] == item.path_of(item.calls[-1])


@pytest.mark.parametrize(
    ("case", "paths"),
    [
        ("handoff", ["Swarm/triage", "Swarm/writer"]),
        (
            "selector",
            ["SelectorGroupChat/SelectorGroupChatManager", "SelectorGroupChat/red", "SelectorGroupChat/green"],
        ),
        ("teams", ["office/desk/red", "office/green"]),
    ],
)
def test_path_names_the_team(run: Play, model_server: ScriptedModelServer, case: str, paths: list[str]) -> None:
    agent, respond, expected = CASES[case]
    model_server.respond_with(respond)
    (item,) = run(agent, ONE)
    assert paths == ["/".join(call.path) for call in item.episode.transitions], item.outcome.error
    assert expected == item.agents


def test_agent_as_a_tool(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(CASES["sub-agent"][1])
    (item,) = run(agents.agent_as_tool, [{"marker": "task"}])
    check_rollouts([item], model_server)
    assert ["calc", "helper", "calc"] == item.agents
    outside = ["invoke_agent calc", "execute_tool helper"]
    assert [*outside, "invoke_agent helper", "chat scripted"] == item.path_of(item.calls[1])


def test_manager_that_asks_a_model_is_an_agent(run: Play, model_server: ScriptedModelServer) -> None:
    _, respond, expected = CASES["selector"]
    model_server.respond_with(respond)
    (item,) = run(agents.selecting, ONE)
    check_rollouts([item], model_server)
    assert expected == item.agents


def test_agent_on_the_core_alone_has_its_registered_name(run: Play, model_server: ScriptedModelServer) -> None:
    (item,) = run(agents.on_the_core_alone, ONE)
    check_rollouts([item], model_server)
    assert (["thinker"], ["invoke_agent thinker", "chat scripted"]) == (item.agents, item.path_of(item.calls[0]))


def test_model_call_in_a_threads_tool(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(CASES["thread"][1])
    (item,) = run(agents.model_call_in_a_tool, ONE)
    check_rollouts([item], model_server)
    assert ["invoke_agent calc", "execute_tool ask", "chat scripted"] == item.path_of(item.calls[1])


@pytest.mark.parametrize("code", [429, 500])
def test_retries_are_one_call(run: Play, model_server: ScriptedModelServer, code: int) -> None:
    model_server.enqueue(Status(code=code, retry_after=0.01), Reply(text="at last"))
    (item,) = run(agents.plain, ONE)
    assert ("succeeded", [code, 200]) == (item.outcome.status, [call.status for call in model_server.calls])
    check_rollouts([item], model_server)
    assert (["calc"], 1) == (item.agents, len(item.failed_calls))
    request_ids = {span.call.request_id for span in item.spans if span.call is not None}
    assert 1 == len(request_ids)
    assert ["superseded", ""] == [call.reject for call in item.episode.transitions]


def test_exceptions_arrive_unchanged(run: Play, model_server: ScriptedModelServer) -> None:
    model_server.enqueue(Status(code=400, message="no such thing"))
    (item,) = run(agents.plain, ONE)
    error = item.outcome.error
    assert error is not None
    assert ("failed", "openai.BadRequestError") == (item.outcome.status, error.type)
    assert "no such thing" in error.message
    (agent,) = item.named("invoke_agent calc")
    assert "error" == agent.status
    check_rollouts([item], model_server)


def test_the_agents_own_exception_arrives_unchanged(run: Play, model_server: ScriptedModelServer) -> None:
    (item,) = run(agents.raising, ONE)
    error = item.outcome.error
    assert error is not None
    assert (True, "task-0") == (error.type.endswith("agents.StoppedError"), error.message)
    check_rollouts([item], model_server)


@pytest.mark.parametrize("case", CASES)
def test_rollouts_at_once_keep_apart(run: Play, model_server: ScriptedModelServer, case: str) -> None:
    agent, respond, expected = CASES[case]
    model_server.respond_with(respond)
    tasks = [{"marker": "task"}] * 8 if case == "sub-agent" else MANY
    played = run(agent, tasks)
    assert ["succeeded"] * 8 == [item.outcome.status for item in played]
    assert [expected] * 8 == [item.agents for item in played]
    check_rollouts(played, model_server)
    shapes = {tuple(sorted(tuple(item.path_of(span)) for span in item.spans)) for item in played}
    assert 1 == len(shapes)
