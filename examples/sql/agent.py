"""A LangGraph agent that answers questions about a SQLite database: write, execute, check, rewrite.

It uses `langchain-openai` and knows nothing of training. By itself it runs against any OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python agent.py out/data/films.db "Which films ...?"
"""

import argparse
import asyncio
import os
import sqlite3
import time
from functools import cache
from pathlib import Path
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

DATABASES = Path(__file__).parent / "out" / "data"
MODEL = os.environ.get("SQL_MODEL", "main_llm")
TEMPERATURE = 0.7
MAX_REWRITES = 2
SECONDS, SHOWN = 5.0, 2

SCHEMA = """
SELECT t.name, group_concat(c.name, ', ') FROM sqlite_master AS t, pragma_table_info(t.name) AS c
WHERE t.type = 'table' GROUP BY t.name ORDER BY t.rowid DESC
"""

WRITE = "Answer with one SQLite query."
CHECK = "Did the query work? Answer yes or no, and why."
REWRITE = "The query failed. Answer with a better one."


class State(TypedDict):
    """The state that nodes pass on; `result` is text, `verdict` the checker's words."""

    database: str
    schema: str
    question: str
    query: str
    result: str
    verdict: str
    rewrites: int


Update = dict[str, str | int]
"""The part of the state that a node changes."""


@cache
def model(temperature: float) -> ChatOpenAI:
    """Return one client for all questions; the endpoint and the key come from the usual environment variables."""
    return ChatOpenAI(
        model=MODEL,
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        temperature=temperature,
    )


def connect(database: str) -> sqlite3.Connection:
    """Open a database so that nothing can be changed in it, and so that a query ends after `SECONDS`."""
    connection = sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro", uri=True)
    deadline = time.monotonic() + SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    return connection


@cache
def schema_of(database: str) -> str:
    """Return the tables and their columns on one line each."""
    connection = connect(database)
    try:
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid DESC"
        ).fetchall()
        columns = {t: connection.execute("SELECT name FROM pragma_table_info(?)", (t,)).fetchall() for (t,) in tables}
    finally:
        connection.close()
    return "\n".join(f"{table}({', '.join(name for (name,) in names)})" for table, names in columns.items())


def run_query(database: str, query: str) -> str:
    """Return the number of rows and the first few, or what went wrong."""
    connection = connect(database)
    try:
        rows = connection.execute(query).fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"error: {error}"
    finally:
        connection.close()
    return f"{len(rows)} rows: " + "; ".join(", ".join(map(str, row)) for row in rows[:SHOWN])


def query_in(text: str) -> str:
    """Return the query in a model's answer, without the fences that many models put around it."""
    body = text.split("```")[1].removeprefix("sql") if text.count("```") >= 2 else text
    return body.strip()


async def ask(system: str, user: str, *, temperature: float = TEMPERATURE) -> str:
    """Return the model's answer."""
    answer = await model(temperature).ainvoke([("system", system), ("user", user)])
    return answer.text


def written(state: State) -> str:
    """Return what `write` tells the model."""
    return f"{state['schema']}\n{state['question']}"


def checked(state: State) -> str:
    """Return what `check` tells the model."""
    return f"{state['question']}\n{state['query']}\n{state['result']}"


def rewritten(state: State) -> str:
    """Return what `rewrite` tells the model."""
    return f"{written(state)}\n{state['query']}\n{state['result']}\n{state['verdict']}"


async def write(state: State) -> Update:
    """Write the first query."""
    return {"query": query_in(await ask(WRITE, written(state)))}


def execute(state: State) -> Update:
    """Run the query."""
    return {"result": run_query(state["database"], state["query"])}


async def check(state: State) -> Update:
    """Have the query and its result judged."""
    return {"verdict": await ask(CHECK, checked(state), temperature=0.0)}


async def rewrite(state: State) -> Update:
    """Write another query in the light of what happened."""
    return {"query": query_in(await ask(REWRITE, rewritten(state))), "rewrites": state["rewrites"] + 1}


def after_check(state: State) -> str:
    """Go on only when the checker said no and there are tries left."""
    is_wrong = state["verdict"].strip().lower().startswith("no")
    return "rewrite" if is_wrong and state["rewrites"] < MAX_REWRITES else END


@cache
def graph() -> CompiledStateGraph[State, None, State, State]:
    """Return the compiled graph."""
    builder = StateGraph(State)
    for node in (write, execute, check, rewrite):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "write")
    builder.add_edge("write", "execute")
    builder.add_edge("execute", "check")
    builder.add_conditional_edges("check", after_check, ["rewrite", END])
    builder.add_edge("rewrite", "execute")
    return builder.compile(name="sql")


def asked(database: str, question: str) -> State:
    """Return what is known at the start."""
    schema = schema_of(database)
    return State(database=database, schema=schema, question=question, query="", result="", verdict="", rewrites=0)


async def solve(task: dict[str, str]) -> str:
    """Answer a task `{"question": ..., "database": ...}`; returns the last query."""
    return (await graph().ainvoke(asked(str(DATABASES / task["database"]), task["question"])))["query"]


def main() -> None:
    """Answer one question."""
    parser = argparse.ArgumentParser(description="Answer a question about a SQLite database.")
    parser.add_argument("database", type=Path)
    parser.add_argument("question")
    options = parser.parse_args()
    database = str(options.database.absolute())
    query = asyncio.run(solve({"database": database, "question": options.question}))
    print(query)
    print(run_query(database, query))


if __name__ == "__main__":
    main()
