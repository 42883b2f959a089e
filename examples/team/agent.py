"""A team of two on LangGraph: a guide who knows where everything lies, and a picker who can open boxes.

The guide reads the order and cannot open a box. The picker can, and reads only the guide's word. It runs by itself
against any OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python agent.py "How many pears?" G=52 E=19
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

MODEL = os.environ.get("TEAM_MODEL", "team")
TEMPERATURE, MAX_TOKENS = 0.7, 24
GUIDE, PICKER = "Say which box.", "Open the box."


class State(MessagesState):
    """The picker's conversation, and the order, which only the guide reads."""

    order: str


@cache
def model() -> ChatOpenAI:
    """Return one client for all orders; the endpoint and the key come from the usual environment variables."""
    return ChatOpenAI(
        model=MODEL,
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        temperature=TEMPERATURE,
        max_tokens=MAX_TOKENS,
    )


async def guide(state: State) -> dict[str, list[AnyMessage]]:
    """Tell the picker which box to open."""
    said = await model().ainvoke([SystemMessage(GUIDE), HumanMessage(state["order"])])
    return {"messages": [HumanMessage(said.text)]}


def make_team(boxes: Mapping[str, str]) -> CompiledStateGraph[State, None, State, State]:
    """Return the team for one order: the guide speaks once, then the picker looks and reports."""

    async def look(box: str) -> str:
        """Open a box and count what lies in it."""
        return boxes.get(box, "nothing")

    tool = StructuredTool.from_function(coroutine=look)

    async def picker(state: State) -> dict[str, list[AnyMessage]]:
        said = await model().bind_tools([tool]).ainvoke([SystemMessage(PICKER), *state["messages"]])
        return {"messages": [said]}

    builder = StateGraph(State)
    builder.add_node("guide", guide)
    builder.add_node("picker", picker)
    builder.add_node("tools", ToolNode([tool]))
    builder.add_edge(START, "guide")
    builder.add_edge("guide", "picker")
    builder.add_conditional_edges("picker", looks_once)
    builder.add_edge("tools", "picker")
    return builder.compile(name="team")


def looks_once(state: State) -> str:
    """Run the picker's first tool call; after a second one the work is over."""
    return tools_condition(state) if len(state["messages"]) == 2 else END


async def solve(task: dict[str, Any]) -> str:
    """Fill an order `{"order": ..., "boxes": {box: count}}`; returns the picker's report."""
    done = await make_team(task["boxes"]).ainvoke({"order": task["order"], "messages": []})
    return done["messages"][-1].text


if __name__ == "__main__":
    print(asyncio.run(solve({"order": sys.argv[1], "boxes": dict(pair.split("=") for pair in sys.argv[2:])})))
