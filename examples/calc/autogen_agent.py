"""The same agent written for AutoGen: an AssistantAgent with the calculator as a function tool.

Nothing here knows of the training. It runs by itself against any OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python autogen_agent.py "What is 3*7+9?"
"""

import asyncio
import os
import sys
from functools import cache

from agent import MAX_TURNS, MODEL, TEMPERATURE
from agent import calc as evaluate
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)


@cache
def client() -> OpenAIChatCompletionClient:
    """Return one client for all questions; the endpoint and the key come from the usual environment variables."""
    return OpenAIChatCompletionClient(
        model=MODEL,
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        model_info=INFO,
        temperature=TEMPERATURE,
        max_tokens=40,
    )


async def calc(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return evaluate(expression)


async def solve(task: dict[str, str]) -> str:
    """Answer a task's question; returns the agent's last text."""
    agent = AssistantAgent(
        "calculator",
        model_client=client(),
        tools=[calc],
        system_message="Use the tool.",
        max_tool_iterations=MAX_TURNS,
    )
    result = await agent.run(task=task["question"])
    return result.messages[-1].to_text()  # type: ignore[union-attr]


if __name__ == "__main__":
    print(asyncio.run(solve({"question": sys.argv[1]})))
