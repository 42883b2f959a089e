"""An agent that reads colours off pictures, two in each of three turns. It uses the `openai` client and nothing else.

Each colour stands for a letter, which the agent is never told. It runs by itself against any endpoint that takes
pictures:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python agent.py left.png right.png
"""

import asyncio
import base64
import os
import sys
from functools import cache
from pathlib import Path

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

MODEL = os.environ.get("GLANCE_MODEL", "glance-lm")
QUESTION = "letters?"
AT_ONCE = 2


@cache
def client() -> AsyncOpenAI:
    """Return one client for all tasks; the endpoint and the key come from the usual environment variables."""
    return AsyncOpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )


def question(pictures: list[str]) -> ChatCompletionMessageParam:
    """Return the message that shows pictures, given as data URLs."""
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return {"role": "user", "content": [*shown, {"type": "text", "text": QUESTION}]}  # type: ignore[return-value]


async def solve(task: dict[str, list[str]]) -> str:
    """Show the task's pictures in turns; returns all letters that the model wrote."""
    messages: list[ChatCompletionMessageParam] = []
    letters = ""
    for start in range(0, len(task["pictures"]), AT_ONCE):
        messages.append(question(task["pictures"][start : start + AT_ONCE]))
        answer = await client().chat.completions.create(
            model=MODEL, messages=messages, temperature=1.0, max_completion_tokens=4
        )
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        letters += text
    return letters


if __name__ == "__main__":
    files = [base64.b64encode(Path(name).read_bytes()).decode() for name in sys.argv[1:]]
    print(asyncio.run(solve({"pictures": [f"data:image/png;base64,{data}" for data in files]})))
