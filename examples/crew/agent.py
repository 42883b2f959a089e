"""A crew of two: a lead who answers customers, and a clerk who can look into the store. Ordinary CrewAI.

It runs by itself against any OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python agent.py "How many of part 4711 are in stock?"
"""

import logging
import os
import sqlite3
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

MODEL = os.environ.get("CREW_MODEL", "crew-lm")
MAX_TURNS = 4
STORE = Path(__file__).parent / "out" / "data" / "stock.db"

# CrewAI warns at every call that it cannot count the tokens of a model that it has not heard of.
logging.getLogger("crewai.llms.base_llm").setLevel(logging.ERROR)


@cache
def model() -> LLM:
    """Return one client for all crews; the endpoint and the key come from the usual environment variables."""
    return LLM(
        model=MODEL,
        provider="openai",
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        temperature=0.7,
        max_tokens=60,
    )


@tool("stock")
def stock(part: str) -> str:
    """Look up how many of a part are in stock."""
    with closing(sqlite3.connect(os.environ.get("STOCK_DB", str(STORE)))) as store:
        found = store.execute("SELECT count FROM parts WHERE part = ?", (part,)).fetchone()
    return str(found[0]) if found else "error: no such part"


def make_crew(question: str) -> Crew:
    """Return the crew for one question; only the clerk can look, and the lead may delegate to the clerk."""
    lead = Agent(
        role="lead",
        goal="Answer customers.",
        backstory="You ask the clerk.",
        llm=model(),
        allow_delegation=True,
        max_iter=MAX_TURNS,
    )
    clerk = Agent(
        role="clerk",
        goal="Count parts.",
        backstory="You look into the store.",
        llm=model(),
        tools=[stock],
        max_iter=MAX_TURNS,
    )
    task = Task(name="question", description=question, expected_output="how many there are", agent=lead)
    return Crew(name="store", agents=[lead, clerk], tasks=[task])


def solve(task: dict[str, str]) -> str:
    """Answer a task's question; returns what the crew says."""
    return str(make_crew(task["question"]).kickoff())


if __name__ == "__main__":
    print(solve({"question": sys.argv[1]}))
