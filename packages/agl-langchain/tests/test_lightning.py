"""Writing, checking and rewriting queries, like Agent Lightning's example of SQL with LangGraph.

Only the import line differs.
"""

import logging
import os
import sqlite3
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from langchain.chat_models import init_chat_model
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, MessagesState, StateGraph

import agl_lightning as agl
from agl_run import Quiet
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer

logger = logging.getLogger(__name__)

WRITE = ChatPromptTemplate([("system", "Write a query in {dialect}."), ("user", "Question: {question}")])
CHECK = ChatPromptTemplate([("system", "Check the query."), ("user", "{question} {query} gives {execution}")])
REWRITE = ChatPromptTemplate([("system", "Rewrite the query."), ("user", "{question} {query} failed: {feedback}")])


class State(MessagesState):
    """The query, and the findings about it."""

    question: str
    query: str
    execution: str
    feedback: str
    num_turns: int


class Querist:
    """A graph of four nodes, three of which call the model."""

    def __init__(self, database: Path, *, endpoint: str, replacement: dict[str, Any], max_turns: int) -> None:
        self.database, self.max_turns = database, max_turns
        self.llm = init_chat_model(
            replacement["model"],
            model_provider="openai",
            openai_api_base=endpoint,
            openai_api_key=os.environ.get("OPENAI_API_KEY", "dummy"),
            temperature=replacement["temperature"],
            max_retries=0,
        )

    def ask(self, template: ChatPromptTemplate, **values: Any) -> str:
        return str(self.llm.invoke(template.invoke(values)).content)

    def write_query(self, state: State) -> Any:
        return {"query": self.ask(WRITE, dialect="sqlite", question=state["question"]), "num_turns": 1}

    def execute_query(self, state: State) -> Any:
        return {"execution": run(self.database, state["query"])}

    def check_query(self, state: State) -> Any:
        values = {name: state[name] for name in ("question", "query", "execution")}
        return {"feedback": self.ask(CHECK, **values)}

    def rewrite_query(self, state: State) -> Any:
        values = {name: state[name] for name in ("question", "query", "feedback")}
        return {"query": self.ask(REWRITE, **values), "num_turns": state["num_turns"] + 1}

    def should_continue(self, state: State) -> Literal["rewrite_query", "__end__"]:
        is_done = "THE QUERY IS CORRECT" in state["feedback"] or state["num_turns"] >= self.max_turns
        return END if is_done else "rewrite_query"

    def graph(self) -> Any:
        builder = StateGraph(State)
        for node in (self.write_query, self.execute_query, self.check_query, self.rewrite_query):
            builder.add_node(node)
        builder.add_edge(START, "write_query")
        builder.add_edge("write_query", "execute_query")
        builder.add_edge("execute_query", "check_query")
        builder.add_conditional_edges("check_query", self.should_continue)
        builder.add_edge("rewrite_query", "execute_query")
        return builder.compile()


class LitQuerist(agl.LitAgent[dict[str, Any]]):
    """Runs the graph on a task; agents whose names contain ``write`` train."""

    def __init__(
        self, trained_agents: str | None = r"write", val_temperature: float | None = None, max_turns: int = 3
    ) -> None:
        super().__init__(trained_agents=trained_agents)
        self.val_temperature, self.max_turns = val_temperature, max_turns

    def rollout(self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout) -> float | None:
        llm: agl.LLM = cast("agl.LLM", resources["main_llm"])
        replacement = {"model": llm.model, **llm.sampling_parameters}
        if rollout.mode != "train":
            replacement = {"model": llm.model, "temperature": self.val_temperature or 0.0}
        graph = Querist(
            Path(task["database"]),
            endpoint=llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),  # pyright: ignore[reportAttributeAccessIssue]
            replacement=replacement,
            max_turns=self.max_turns,
        ).graph()
        handler = self.tracer.get_langchain_handler()
        result = graph.invoke(
            {"question": task["question"]}, {"callbacks": [handler] if handler else [], "recursion_limit": 100}
        )
        logger.info("[Rollout %s] %s", rollout.rollout_id, result["query"])
        return 1.0 if run(Path(task["database"]), result["query"]) == task["rows"] else 0.0


def run(database: Path, query: str) -> str:
    """Return the rows that a query finds, or the error message."""
    connection = sqlite3.connect(database)
    try:
        return str(connection.execute(query).fetchall())
    except sqlite3.Error as error:
        return f"Error: {error}"
    finally:
        connection.close()


def respond(request: ModelRequest) -> Reply:
    """Write a query with a wrong column, find the mistake, and write a right query."""
    job, text = request.turns[0].text, request.last_text
    if "Check" in job:
        return Reply(text="THE QUERY IS WRONG" if "Error" in text else "THE QUERY IS CORRECT")
    return Reply(text="SELECT name FROM birds" if "Rewrite" in job else "SELECT title FROM birds")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = tmp_path / "birds.sqlite"
    with sqlite3.connect(file) as connection:
        connection.executescript("CREATE TABLE birds (name TEXT); INSERT INTO birds VALUES ('wren'), ('kite');")
    connection.close()
    return [{"question": "Which birds are there?", "database": str(file), "rows": "[('wren',), ('kite',)]"}]


@pytest.mark.parametrize("match", [None, "check"])
def test_querist_runs_in_dev_with_every_node_named(match: str | None, tasks: list[dict[str, Any]]) -> None:
    agl.setup_logging(console=False, apply_to=[__name__])
    with ScriptedModelServer(respond=respond) as server:
        trainer = agl.Trainer(
            n_workers=1,
            adapter={"agent_match": match},
            initial_resources={
                "main_llm": agl.LLM(
                    endpoint=server.base_url, model="scripted", sampling_parameters={"temperature": 0.7}
                )
            },
            progress=Quiet(),
        )
        assert match == trainer.adapter.agent_match
        (episode,) = trainer.dev(LitQuerist(), tasks).episodes

    assert 1.0 == episode.reward
    assert ["write_query", "check_query", "rewrite_query", "check_query"] == [c.agent for c in episode.transitions]
