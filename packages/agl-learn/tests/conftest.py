"""A small agent with a learner: users wish for polite answers, and a scripted editor knows how to get them."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl import PluginManager
from agl.contracts import Store
from agl.schemas import PromptTemplate, ResourceVersion
from agl_inspect.stores import build_store
from agl_learn.contracts import Conversation
from agl_learn.settings import LearnerFile
from agl_run import learner_of, load_config
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer

AGENT = """
import asyncio
from openai import AsyncOpenAI

async def solve(task, llm, prompt):
    async with AsyncOpenAI(base_url=llm.endpoint, api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": prompt.format(question=task["question"])}]
        answer = await client.chat.completions.create(model=llm.model, messages=messages)
    return answer.choices[0].message.content

def wish(rollout, spans):
    said = [span.attributes["agl.output"] for span in spans if "agl.output" in span.attributes]
    return None if not said else float(rollout.task["wish"] in said[-1])
"""
EXPERIMENT = """
[experiment]
name = "desk"
agent = "learn_agent:solve"
store = "sqlite:///runs/desk.db"
hidden = ["wish"]

[gateway]
use = "none"

[policy.llm]
use = "openai"
model = "scripted"
base_url = "URL"
api_key_env = ""

[resource.prompt]
template = "Answer: {question}"

[[reward]]
use = "learn_agent:wish"

[[algorithm]]
use = "apo"
tunes = "prompt"
params = { optimizer = { base_url = "URL", model = "editor" }, budget = 100 }

[learn.support]
tunes = "prompt"
"""
POLITE = "Answer politely: {question}"


def respond(request: ModelRequest) -> Reply:
    """Answer as the prompt asks; the editor always proposes the polite prompt."""
    if request.body.get("model") == "editor":
        return Reply(text=f"Be polite.\n<new_text>\n{POLITE}\n</new_text>")
    if "broken" in request.last_text:
        raise AssertionError("the agent asked for a broken answer")
    return Reply(text="Please wait." if "politely" in request.last_text else "Wait.")


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(respond=respond) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, server: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the experiment file ``desk.toml``."""
    monkeypatch.delitem(sys.modules, "learn_agent", raising=False)
    (tmp_path / "learn_agent.py").write_text(AGENT, encoding="utf-8")
    (tmp_path / "desk.toml").write_text(EXPERIMENT.replace("URL", server.base_url), encoding="utf-8")
    (tmp_path / "runs").mkdir()
    return tmp_path


UseLearner = Callable[[Callable[[LearnerFile], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(params=["memory", pytest.param("sqlite", marks=pytest.mark.long)])
def with_learner(request: pytest.FixtureRequest, folder: Path) -> UseLearner:
    """Return a function that runs a coroutine with the learner of the file, over each kind of store."""
    return lambda work: asyncio.run(run_with(folder, work, url="memory://" if request.param == "memory" else ""))


async def run_with(
    folder: Path, work: Callable[[LearnerFile], Coroutine[Any, Any, Any]], *, url: str = "", toml: str = ""
) -> Any:
    """Run a coroutine with the learner of ``desk.toml``; the version ``first`` of the prompt is published."""
    file = folder / "desk.toml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("sqlite:///runs/desk.db", url or "sqlite:///runs/desk.db") + toml, encoding="utf-8")
    config = load_config(file)
    manager = PluginManager.from_environment()
    store = build_store(manager, url or f"sqlite:///{folder}/runs/desk.db")
    name, settings = learner_of(config)
    try:
        await publish(store, first="Answer: {question}")
        return await work(
            LearnerFile(name=name, settings=settings, config=config, folder=folder, manager=manager, store=store)
        )
    finally:
        await store.close()


async def publish(store: Store, **texts: str) -> None:
    """Publish versions of the prompt by name."""
    await store.publish(
        [
            ResourceVersion(name="prompt", version=name, resource=PromptTemplate(template=text))
            for name, text in texts.items()
        ]
    )


def conversation(number: int, *, user: str = "", wish: str = "Please", **others: Any) -> Conversation:
    """Return a conversation with a user of its own."""
    task = {"question": f"where is order {number}?", "wish": wish}
    return Conversation(
        rollout_id=f"talk-{number}", user=user or f"u{number}", started_at=float(number), task=task, **others
    )
