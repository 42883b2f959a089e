"""An experiment whose agent guesses a word, and servers that follow or violate OpenEnv's protocol."""

import asyncio
import json
import threading
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agl.schemas import Episode, Span
from agl.stores import all_spans
from agl_run import Trainer, load_config
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer

ASYNC_AGENT = """
import openai

async def play(task, llm, env):
    step = await env.reset(word=task["word"])
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        while not step.done:
            messages = [{"role": "user", "content": str(step.observation)}]
            answer = await client.chat.completions.create(model=llm.model, messages=messages)
            step = await env.step({"guess": answer.choices[0].message.content})
            if step.refused:
                return step.refused
    return (await env.state())["step_count"]
"""

SYNC_AGENT = ASYNC_AGENT.replace("async ", "").replace("await ", "").replace("AsyncOpenAI", "OpenAI")

FILE = """
[experiment]
name = "guess"
agent = "AGENT:play"
val = "tasks.jsonl"

[runner]
use = "openenv"
concurrency = 3
timeout_s = 60
params = PARAMS

[policy.main]
use = "openai"
model = "scripted"
base_url = "BASE_URL"
api_key_env = ""
"""

Handler = Callable[[web.WebSocketResponse], Awaitable[None]]


@pytest.fixture
def model() -> Iterator[ScriptedModelServer]:
    """A model that answers ``red``, unless a test gives it a script."""
    with ScriptedModelServer(default=Reply(text="red")) as server:
        yield server


@pytest.fixture
def trainer(tmp_path: Path, model: ScriptedModelServer) -> Callable[..., Trainer]:
    """A function that makes the trainer of an experiment from parameters of the runner and from words as tasks."""

    def make(
        params: str, *, agent: str = ASYNC_AGENT, words: tuple[str, ...] = ("red",), timeout_s: int = 60
    ) -> Trainer:
        name = f"player_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(agent)
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in words))
        text = FILE.replace("AGENT", name).replace("PARAMS", params).replace("BASE_URL", model.base_url)
        (tmp_path / "experiment.toml").write_text(text.replace("timeout_s = 60", f"timeout_s = {timeout_s}"))
        return Trainer.from_config(load_config(tmp_path / "experiment.toml"), folder=tmp_path)

    return make


@contextmanager
def serving(handler: Handler) -> Generator[str]:
    """Serve a WebSocket at ``/ws`` in a separate thread; yields the server's base URL."""
    loop = asyncio.new_event_loop()

    async def answer(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=2**26)
        await socket.prepare(request)
        await handler(socket)
        return socket

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/ws", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def playing(answers: Callable[[str, dict[str, Any]], Any]) -> Handler:
    """Return a handler that answers each message by a function of its type and data, with JSON or with raw text."""

    async def handle(socket: web.WebSocketResponse) -> None:
        async for message in socket:
            asked = json.loads(message.data)
            answer = answers(asked["type"], asked.get("data") or {})
            await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))

    return handle


def observed(reward: float | None = None, *, done: bool = False, **observation: Any) -> dict[str, Any]:
    """Return a server's answer to a reset or a step."""
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def guessing(kind: str, data: dict[str, Any]) -> Any:
    """Answer as an environment in which any guess ends the episode with a reward of 1."""
    if kind == "state":
        return {"type": "state", "data": {"step_count": 1}}
    return observed(hint="a colour") if kind == "reset" else observed(1.0, done=True, hint="right")


def spans_of(folder: Path, episode: Episode) -> list[Span]:
    """Return the spans of an episode from the store of the experiment in a folder."""

    async def read() -> list[Span]:
        store = SQLiteStore(f"sqlite:///{folder / 'runs' / 'agl.db'}")
        try:
            return await all_spans(store, episode.rollout.rollout_id, episode.attempt.attempt_id)
        finally:
            await store.close()

    return asyncio.run(read())
