"""An agent that answers arithmetic questions with a calculator tool. It uses the `openai` client and nothing else.

It runs by itself against any OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python agent.py "What is 3*7+9?"
"""

import ast
import asyncio
import json
import operator
import os
import sys
from functools import cache

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

MODEL = os.environ.get("CALC_MODEL", "calc-lm")
MAX_TURNS = 3
TEMPERATURE = 0.7
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@cache
def client() -> AsyncOpenAI:
    """Return one client for all questions; the endpoint and the key come from the usual environment variables."""
    return AsyncOpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )


def calc(expression: str) -> str:
    """Evaluate sums, differences and products of integers; what is wrong is said in the result."""
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only integers, +, - and * are known")


def run_tool(name: str, arguments: str) -> str:
    """Run one tool call and return what the model reads."""
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return "error: give an expression"
    return calc(str(expression)) if name == "calc" else f"error: no tool {name}"


async def solve(task: dict[str, str]) -> str:
    """Answer a task's question; returns the model's last text."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(MAX_TURNS):
        answer = await client().chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], temperature=TEMPERATURE, max_completion_tokens=40
        )
        message = answer.choices[0].message
        messages.append(message.to_dict())  # type: ignore[arg-type]
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""


if __name__ == "__main__":
    print(asyncio.run(solve({"question": sys.argv[1]})))
