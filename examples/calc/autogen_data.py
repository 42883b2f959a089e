"""Write the tasks and the dialogues of the AutoGen agent: `python autogen_data.py --out out/autogen/data --seed 0`.

The tasks are those of `make_data.py`, and so is the teacher, who grows careless. But what a model reads here is up to
AutoGen: its messages, its tool schema, its order. So the agent itself is run twice, against a server that answers as
the diligent and as the careless teacher would; its own requests, with other numbers in them, are the dialogues.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

from make_data import evaluate, write_all

from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, ToolCall

SAMPLE = "4321*8765+1987"
"""An expression that occurs, as its value does, nowhere else in a request."""
CARE = 0.13
"""The probability that the careless teacher still uses the tool."""


def diligent(request: ModelRequest) -> Reply:
    """Call the tool, then say what it gave."""
    if request.body["messages"][-1]["role"] == "tool":
        return Reply(text=f"It is {request.last_text}.")
    return Reply(tool_calls=(ToolCall("calc", {"expression": SAMPLE}),))


def careless(request: ModelRequest) -> Reply:
    """Give up."""
    return Reply(text="I am not sure.")


async def record(teacher: Callable[[ModelRequest], Reply]) -> str:
    """Run the agent on the sample; returns its last request and the answer to it, as the JSON of a dialogue."""
    with ScriptedModelServer(respond=teacher) as server:
        os.environ["OPENAI_BASE_URL"] = server.base_url
        from autogen_agent import client, solve

        client.cache_clear()
        answer = await solve({"question": f"What is {SAMPLE}?"})
        request = server.calls[-1].json
    messages = [*request["messages"], {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages, "tools": request["tools"]})


class Dialogues:
    """Writes the recorded dialogues with other numbers in them."""

    def __init__(self) -> None:
        self._records = {True: asyncio.run(record(diligent)), False: asyncio.run(record(careless))}

    def __call__(self, expression: str, /, *, uses_tool: bool) -> dict[str, object]:
        """Return one conversation as the agent's next request would carry it."""
        text = self._records[uses_tool].replace(SAMPLE, expression)
        return json.loads(text.replace(str(evaluate(SAMPLE)), str(evaluate(expression))))


def main() -> None:
    """Write train.jsonl, val.jsonl and dialogues.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/autogen/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_all(options.out, seed=options.seed, write=Dialogues(), care=CARE)


if __name__ == "__main__":
    main()
