"""Agents that the tests run."""

from typing import Any

import httpx

import agl
from agl.tracing import open_span

QUESTIONS = ("red", "green", "blue")


async def ask(llm: Any, text: str) -> str:
    body = {
        "model": llm.model,
        "temperature": 0.5,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}],
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}],
    }
    headers = {"Authorization": f"Bearer {llm.api_key or 'none'}"}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)
    return str(answer.json()["choices"][0]["message"]["content"])


async def team(task: dict[str, Any], llm: Any) -> None:
    """Run two agents, one of them with a tool; raises an error on blue tasks."""
    with open_span(agent="planner"):
        await ask(llm, f"plan for {task['colour']}")
    with open_span(agent="writer"):
        await ask(llm, "write")
        with open_span(tool="look_up", arguments={"colour": task["colour"]}, result="a secret result"):
            pass
    agl.emit_reward({"form": 1.0, "goal": 0.5}, name="parts", primary="goal", feedback="secret feedback")
    if task["colour"] == "blue":
        raise KeyError("secret error")


async def plain(task: dict[str, Any]) -> float:
    return 1.0 if task["colour"] == "red" else 0.0
