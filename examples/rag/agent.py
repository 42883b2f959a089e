"""An agent of the OpenAI Agents SDK that answers two-hop questions by searching a wiki.

It runs by itself against any OpenAI-compatible endpoint:

    python agent.py --base-url http://127.0.0.1:8000/v1 --model qwen "What is the home of the mentor of Ada Holt?"
"""

import argparse
import asyncio
import os
from functools import cache
from pathlib import Path

import wiki
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

INSTRUCTIONS = "Search one fact at a time, then reply with the answer alone."
MAX_TURNS = 4
TEMPERATURE = 0.7
WIKI = Path(os.environ.get("RAG_WIKI", Path(__file__).parent / "out" / "data" / "wiki.db"))


@function_tool
def search(query: str) -> str:
    """Search the wiki.

    Args:
        query: Words to look for, such as `the home of Ada Holt`.
    """
    return "\n".join(wiki.search(WIKI, query)) or "nothing found"


@cache
def searcher() -> Agent[None]:
    """Return the agent; the endpoint, the key and the model's name come from environment variables."""
    client = AsyncOpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    return Agent(
        name="searcher",
        instructions=INSTRUCTIONS,
        tools=[search],
        model=OpenAIChatCompletionsModel(model=os.environ.get("RAG_MODEL", "rag-lm"), openai_client=client),
        model_settings=ModelSettings(temperature=TEMPERATURE, max_tokens=48),
    )


async def solve(task: dict[str, str]) -> str:
    """Answer a task's question; empty where the model went on searching, or asked for a tool that is not there."""
    try:
        result = await Runner.run(searcher(), task["question"], max_turns=MAX_TURNS)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return ""
    return str(result.final_output)


def main() -> None:
    """Answer one question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--base-url", help="the endpoint; by default OPENAI_BASE_URL, with the key OPENAI_API_KEY")
    parser.add_argument("--model", help="the model's name there; by default RAG_MODEL, or rag-lm")
    options = parser.parse_args()
    for name, value in (("OPENAI_BASE_URL", options.base_url), ("RAG_MODEL", options.model)):
        if value:
            os.environ[name] = value
    set_tracing_disabled(True)  # else the SDK posts every prompt to its vendor
    print(asyncio.run(solve({"question": options.question})))


if __name__ == "__main__":
    main()
