"""The same team written for AutoGen: a flow of two AssistantAgents, of which the second reads only the first.

It runs by itself against any OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python autogen_agent.py "How many pears?" G=52 E=19
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from agent import GUIDE, MAX_TOKENS, MODEL, PICKER, TEMPERATURE
from autogen_agentchat.agents import AssistantAgent, MessageFilterAgent, MessageFilterConfig, PerSourceFilter
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)


@cache
def client() -> OpenAIChatCompletionClient:
    """Return one client for all orders; the endpoint and the key come from the usual environment variables."""
    return OpenAIChatCompletionClient(
        model=MODEL,
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        model_info=INFO,
        temperature=TEMPERATURE,
        max_tokens=MAX_TOKENS,
    )


def make_team(boxes: Mapping[str, str]) -> GraphFlow:
    """Return the team for one order: the guide speaks once, then the picker looks and reports."""

    async def look(box: str) -> str:
        """Open a box and count what lies in it."""
        return boxes.get(box, "nothing")

    guide = AssistantAgent("guide", model_client=client(), system_message=GUIDE)
    picker = AssistantAgent("picker", model_client=client(), system_message=PICKER, tools=[look], max_tool_iterations=2)
    heard = MessageFilterConfig(per_source=[PerSourceFilter(source="guide", position="last", count=1)])
    listener = MessageFilterAgent("listener", wrapped_agent=picker, filter=heard)
    flow = DiGraphBuilder().add_node(guide).add_node(listener).add_edge(guide, listener)
    return GraphFlow([guide, listener], graph=flow.build(), name="team")


async def solve(task: dict[str, Any]) -> str:
    """Fill an order `{"order": ..., "boxes": {box: count}}`; returns the picker's report."""
    result = await make_team(task["boxes"]).run(task=task["order"])
    return next(m.to_text() for m in reversed(result.messages) if m.source == "picker")  # type: ignore[union-attr]


if __name__ == "__main__":
    print(asyncio.run(solve({"order": sys.argv[1], "boxes": dict(pair.split("=") for pair in sys.argv[2:])})))
