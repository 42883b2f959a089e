"""Two models fill in an order form: a writer reads the customer's letter, a checker makes the draft fit for the shop.

Plain Python and the `openai` client. It runs by itself against any OpenAI-compatible endpoint:

    OPENAI_API_KEY=... MIXED_MODEL=gpt-4.1-mini python agent.py "This is Holt from Bergen. By 3 May 2027 ..."
"""

import asyncio
import os
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import house
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

WRITE = "\n".join(["Fill in the form.", *(f"{field}:" for field in house.FIELDS)])
CHECK = "You are the checker.\nMake the form ready.\n{draft}"
"""The checker's prompt that the experiment starts from; it knows nothing of the shop."""


@cache
def connections(base_url: str) -> AsyncOpenAI:
    """Return one client per endpoint for all letters: making one takes longer than a short request."""
    return AsyncOpenAI(base_url=base_url, api_key="none")


async def ask(llm: Any, messages: list[ChatCompletionMessageParam]) -> str:
    """Return a model's answer."""
    client = connections(llm.base_url).with_options(api_key=llm.api_key or "none")
    answer = await client.chat.completions.create(model=llm.model, messages=messages, temperature=0.8)
    return answer.choices[0].message.content or ""


async def solve(task: dict[str, Any], writer: Any, checker: Any, checker_prompt: Any) -> str:
    """Handle one letter; returns the form as it is sent."""
    draft = await ask(writer, [{"role": "system", "content": WRITE}, {"role": "user", "content": task["letter"]}])
    return await ask(checker, [{"role": "user", "content": checker_prompt.format(draft=draft)}])


if __name__ == "__main__":
    endpoint = SimpleNamespace(
        base_url=os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        model=os.environ.get("MIXED_MODEL", "gpt-4.1-mini"),
    )
    print(asyncio.run(solve({"letter": sys.argv[1]}, endpoint, endpoint, CHECK)))
