"""A LangGraph agent that answers the customers of a shop: it looks the question up in the shop's pages, and answers.

It uses `langchain-openai` and knows nothing of learning. It runs by itself against any OpenAI-compatible endpoint:

    OPENAI_API_KEY=... SUPPORT_MODEL=gpt-4.1-mini python agent.py "When does my parcel arrive?"
"""

import asyncio
import os
import re
import sys
from functools import cache
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from shop import PAGES

MODEL = os.environ.get("SUPPORT_MODEL", "support_llm")
PROMPT = "You answer the customers of a garden shop.\nAnswer in one sentence.\nThe page that fits: {page}"

Message = tuple[str, str]
"""The role, `user` or `assistant`, and the text."""


class State(TypedDict):
    """The state that nodes pass on; `headers` are sent with the call of the model."""

    messages: list[Message]
    prompt: str
    headers: dict[str, str]
    page: str
    answer: str


@cache
def model() -> ChatOpenAI:
    """Return one client for all customers; the endpoint and the key come from the usual environment variables."""
    return ChatOpenAI(
        model=MODEL,
        base_url=os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )


def words(text: str) -> set[str]:
    """Return the words of a text that say something about its topic."""
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}


def retrieve(state: State) -> dict[str, str]:
    """Find the page that shares most words with what the customer said."""
    said = words(" ".join(text for role, text in state["messages"] if role == "user"))
    page = max(PAGES, key=lambda page: len(said & words(f"{page.topic} {page.text}")))
    return {"page": f"{page.topic}: {page.text} Link: {page.link} Next step: {page.step}"}


async def answer(state: State) -> dict[str, str]:
    """Let the model answer with the page in its prompt."""
    system = state["prompt"].format(page=state["page"])
    said = await model().ainvoke([("system", system), *state["messages"]], extra_headers=state["headers"])
    return {"answer": said.text}


@cache
def graph() -> CompiledStateGraph[State, None, State, State]:
    """Return the compiled graph."""
    builder = StateGraph(State)
    builder.add_node("retrieve", retrieve)
    builder.add_node("answer", answer)
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "answer")
    builder.add_edge("answer", END)
    return builder.compile(name="support")


async def reply(messages: list[Message], prompt: str, headers: dict[str, str] | None = None) -> str:
    """Answer a conversation, whose last message is the customer's."""
    state = State(messages=messages, prompt=prompt, headers=headers or {}, page="", answer="")
    return (await graph().ainvoke(state))["answer"]


async def solve(task: dict[str, Any], answer_prompt: Any) -> str:
    """Answer a task `{"question": ...}` of the experiment with the version of the prompt that is under trial."""
    return await reply([("user", task["question"])], answer_prompt.template)


if __name__ == "__main__":
    print(asyncio.run(reply([("user", sys.argv[1])], PROMPT)))
