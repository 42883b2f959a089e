"""The OpenAI Agents SDK, used in every way, eight rollouts at once in one process, recorded in it and by the gateway.

| | OpenAI Agents SDK |
|---|---|
| sync, async, stream, tool, parallel tools, thread | green |
| sub-agent, hand-off | green |
| retry after 429 and 500 | green |
| exception | of a tool, of the model |
| Responses API | green, but rejected for training: vLLM's and the scripted server's leave out log-probabilities |

No cell is impossible. Every test of :data:`CELLS` checks what :func:`rollouts.check` says: no call lost or attributed
to another rollout, token ids equal to the server's, one tree, no span left open.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from agents import Runner
from openai import AsyncOpenAI

from agl_openai_agents.tracer import OpenAIAgentsTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import check, play

from . import programs

COUNT = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A way to use the SDK: the program, the (agent, path) of its calls, and additional text for the task."""

    agent: Callable[[Any, Any], Any]
    who: list[tuple[str, str]]
    task: str = ""
    errors: int = 0
    is_streamed: bool = False
    has_ids: bool = True


def client_of(llm: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none")


def program(work: Callable[[AsyncOpenAI, str], Awaitable[Any]]) -> Callable[[Any, Any], Any]:
    """An asynchronous program with its own client."""

    async def agent(task: Any, llm: Any) -> None:
        async with client_of(llm) as client:
            await work(client, task["question"])

    return agent


def run_sync(task: Any, llm: Any) -> None:
    Runner.run_sync(programs.helper(client_of(llm)), task["question"])


def threads(task: Any, llm: Any) -> None:
    programs.in_threads(lambda: programs.helper(client_of(llm)), task["question"])


def plain(client: AsyncOpenAI, question: str) -> Any:
    return Runner.run(programs.helper(client), question)


def in_a_trace(client: AsyncOpenAI, question: str) -> Any:
    return programs.traced(programs.helper(client), question)


def stream(client: AsyncOpenAI, question: str) -> Any:
    return programs.stream(programs.helper(client, tools=[programs.weather]), question)


def tool(client: AsyncOpenAI, question: str) -> Any:
    return Runner.run(programs.helper(client, tools=[programs.weather]), question)


def parallel_tools(client: AsyncOpenAI, question: str) -> Any:
    return Runner.run(programs.helper(client, tools=programs.thinking_tools(client)), question)


def hand_off(client: AsyncOpenAI, question: str) -> Any:
    return Runner.run(programs.triage(client), question)


def hand_off_in_a_stream(client: AsyncOpenAI, question: str) -> Any:
    return programs.stream(programs.triage(client), question)


def sub_agent(client: AsyncOpenAI, question: str) -> Any:
    return Runner.run(programs.boss(client), question)


def responses(client: AsyncOpenAI, question: str) -> Any:
    return Runner.run(programs.helper(client, tools=[programs.weather], api="responses"), question)


def responses_stream(client: AsyncOpenAI, question: str) -> Any:
    return programs.stream(programs.helper(client, tools=[programs.weather], api="responses"), question)


HELPER = ("helper", "helper")
TOOLS = [("helper", "helper/lookup"), ("helper", "helper/search")]
HANDED = [("triage", "triage"), ("writer", "writer")]
FAILS = "fail twice"

CELLS = {
    "sync": Cell(agent=run_sync, who=[HELPER]),
    "async": Cell(agent=program(plain), who=[HELPER]),
    "trace": Cell(agent=program(in_a_trace), who=[("helper", "joke/helper")]),
    "stream": Cell(agent=program(stream), who=[HELPER] * 2, is_streamed=True),
    "tool": Cell(agent=program(tool), who=[HELPER] * 2),
    "parallel tools": Cell(agent=program(parallel_tools), who=[HELPER, HELPER, *TOOLS]),
    "hand-off": Cell(agent=program(hand_off), who=HANDED),
    "hand-off in a stream": Cell(agent=program(hand_off_in_a_stream), who=HANDED, is_streamed=True),
    "sub-agent": Cell(agent=program(sub_agent), who=[("boss", "boss")] * 2 + [("expert", "boss/consult/expert")]),
    "retry": Cell(agent=program(plain), who=[HELPER], task=FAILS, errors=2),
    "retry in a stream": Cell(agent=program(stream), who=[HELPER] * 2, task=FAILS, errors=2, is_streamed=True),
    "thread": Cell(agent=threads, who=[HELPER] * 2),
    "responses": Cell(agent=program(responses), who=[HELPER] * 2, has_ids=False),
    "responses stream": Cell(agent=program(responses_stream), who=[HELPER] * 2, is_streamed=True, has_ids=False),
}


@pytest.mark.parametrize("gateway", [False, True], ids=["wire", "gateway"])
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_every_call_is_recorded_where_it_was_made(
    cell: Cell, gateway: bool, server: ScriptedModelServer, tracer: OpenAIAgentsTracer
):
    played = play(cell.agent, server, tracer, count=COUNT, gateway=gateway, task=cell.task)
    assert [None] * COUNT == [run.attempt.error for run in played]
    check(played, server, errors=cell.errors, callers=("chat", "execute_tool"))
    for run in played:
        answered = [t for t in run.episode.transitions if t.reject in ("", "length_mismatch", "missing_token_ids")]
        assert sorted(cell.who) == sorted((t.agent, "/".join(t.path)) for t in answered)
        # A gateway asks policies in training for chat completions, whatever API the agent speaks.
        assert {cell.has_ids or gateway} == {not t.reject for t in answered}
        assert {cell.is_streamed} == {span.call.is_streamed for span in run.calls}
        assert cell.errors == len(run.episode.transitions) - len(answered)
        assert {"ok"} == {span.status for span in run.spans if span.call is None}


def broken_tool(client: AsyncOpenAI, question: str) -> Any:
    return Runner.run(programs.helper(client, tools=[programs.broken]), question)


def broken_tool_in_a_stream(client: AsyncOpenAI, question: str) -> Any:
    return programs.stream(programs.helper(client, tools=[programs.broken]), question)


FAILURES = {
    "tool": (broken_tool, "", "no such city broken {mark}", {"execute_tool broken", "invoke_agent helper"}, 0),
    "stream": (broken_tool_in_a_stream, "", "no such city broken {mark}", {"execute_tool broken"}, 0),
    "model": (plain, "refuse", "Error code: 400", {"chat scripted", "invoke_agent helper"}, 1),
}


@pytest.mark.parametrize("gateway", [False, True], ids=["wire", "gateway"])
@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
def test_exceptions_pass_through_and_mark_what_they_passed(
    case: Any, gateway: bool, server: ScriptedModelServer, tracer: OpenAIAgentsTracer
):
    work, task, message, names, errors = case
    played = play(program(work), server, tracer, count=COUNT, gateway=gateway, task=task)
    check(played, server, errors=errors)
    for run in played:
        assert run.attempt.error is not None
        assert message.format(mark=run.rollout.task["mark"]) in run.attempt.error.message
        failed = {span.name for span in run.spans if span.status == "error" and span.call is None}
        assert {"rollout", *names} <= failed
