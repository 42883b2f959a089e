"""An agent that books meeting rooms with two tools. It uses the `openai` client and nothing else.

It runs by itself against any OpenAI-compatible endpoint:

    OPENAI_API_KEY=... ROOMS_MODEL=gpt-4.1-mini python agent.py "A room for 6 people on Monday at 10, please."
"""

import asyncio
import json
import os
import re
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import office
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

MAX_TURNS = 4
PROMPT = (
    "You book meeting rooms.\nRequest: {request}\nWhen you have decided, answer with BOOK and the name of one room."
)


def tool(name: str, description: str, **properties: str) -> ChatCompletionToolParam:
    """One tool as the chat API has it; `properties` gives the JSON type of each argument."""
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("find_free_rooms", "Names of the rooms that are free at an hour of a day.", day="string", hour="integer"),
    tool("room_details", "Capacity, equipment, access and repairs of a room.", room="string"),
]


def run_tool(name: str, arguments: str) -> str:
    """Run one tool call and return what the model reads; what is wrong with the call is said in the result."""
    try:
        values = json.loads(arguments)
        if name == "find_free_rooms":
            return json.dumps(office.find_free_rooms(str(values["day"]), int(values["hour"])))
        if name == "room_details":
            return json.dumps(office.room_details(str(values["room"])))
    except (ValueError, KeyError, TypeError) as error:
        return json.dumps({"error": f"bad arguments: {error}"})
    return json.dumps({"error": f"there is no tool {name!r}"})


@cache
def connections(base_url: str) -> AsyncOpenAI:
    """Return one client per endpoint for all bookings: making one takes longer than a short request."""
    return AsyncOpenAI(base_url=base_url, api_key="none")


async def book(task: dict[str, Any], llm: Any, booking_prompt: Any) -> str:
    """Handle one request; returns the model's last text."""
    filled = booking_prompt.format(request=task["request"])  # a text, or messages that are ready to send
    messages: list[ChatCompletionMessageParam] = (
        [{"role": "user", "content": filled}] if isinstance(filled, str) else [*filled]
    )
    client = connections(llm.base_url).with_options(api_key=llm.api_key or "none")
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.to_dict())  # type: ignore[arg-type]
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def booked_room(text: str) -> str:
    """The room that an answer names last, empty when it names none."""
    found = re.findall(r"BOOK\W+([A-Za-z]+)", text)
    return found[-1].lower() if found else ""


if __name__ == "__main__":
    endpoint = SimpleNamespace(
        base_url=os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        model=os.environ.get("ROOMS_MODEL", "gpt-4.1-mini"),
    )
    print(asyncio.run(book({"request": sys.argv[1]}, endpoint, PROMPT)))
