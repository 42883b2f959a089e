"""The world of the learner's benchmark: models behind a network, an agent, and customers who rate its answers.

``python -m benchmarks._desk models|customers ...`` runs a part of it as a process. No prompt is better than another
here, but the algorithm believes so: rounds of training and replays follow each other without an end.
"""

import asyncio
import random
import sys
import time
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from openai import AsyncOpenAI

from benchmarks._load import Connection

MODEL_S = 0.02
"""The time that the model takes for an answer."""

CONNECTIONS = 64
LIKES = 0.6
CONVERSATIONS_EACH = 4

EXPERIMENT = """
[experiment]
name = "desk"
agent = "benchmarks._desk:solve"
store = "sqlite:///runs.db"

[runner]
concurrency = 2         # the cores also serve

[gateway]
use = "none"

[policy.llm]
use = "openai"
model = "model"
base_url = "{models}"
api_key_env = ""

[resource.prompt]
template = "Answer: {{question}}"

[[reward]]
use = "benchmarks._desk:luck"

[[algorithm]]
use = "apo"
tunes = "prompt"
params = {{ optimizer = {{ base_url = "{models}", model = "editor" }}, budget = 110 }}

[learn.desk]
tunes = ["prompt"]
every = {every}
settle = "{settle}"
"""


def write_experiment(folder: Path, *, models: str, every: int, settle: str) -> None:
    """Write ``desk.toml``, with a learner that learns after each ``every`` conversations."""
    text = EXPERIMENT.format(models=models, every=every, settle=settle)
    (folder / "desk.toml").write_text(text, encoding="utf-8")


# The agent


@cache
def _client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url, api_key="k", max_retries=0)


async def solve(task: Any, llm: Any, prompt: Any) -> str:
    """Answer a question."""
    messages: Any = [{"role": "user", "content": prompt.format(question=task["question"])}]
    answer = await _client(llm.endpoint).chat.completions.create(model=llm.model, messages=messages)
    return answer.choices[0].message.content or ""


def luck(rollout: Any, spans: Any) -> float:
    """Return 0 or 1 by chance, always the same for the same versions and question.

    While it trains, each new prompt looks better, so that every round ends with a candidate, which the replay refuses.
    """
    if rollout.experiment.startswith("desk-learn"):
        return float("prompt-initial" not in rollout.resources["prompt"])
    drawn = blake2b(f"{sorted(rollout.resources.items())}{rollout.task['question']}".encode(), digest_size=1).digest()
    return float(drawn[0] < 256 * LIKES)


# The models


async def models() -> None:
    """Serve a model that answers and one that writes prompts, each new; print the URL."""
    draw = random.Random()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:

        asked = draw.randrange(10**9)
        body = msgspec.json.decode(await request.read())
        is_editor = body["model"] == "editor"
        text = f"Advice.\n<new_text>\nAnswer {asked}: {{question}}\n</new_text>" if is_editor else "It is so. " * 40
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": f"c{asked}", "object": "chat.completion", "created": 0, "model": body["model"]}
        await asyncio.sleep(MODEL_S)
        return web.json_response({**reply, "choices": [choice]})

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


# The customers


class Customers:
    """Customers who begin conversations at fixed times, ask one question, give a thumb and leave."""

    def __init__(self, url: str, token: str, *, seed: int) -> None:
        self._url, self._token, self._seed = url, token, seed
        self._free: asyncio.Queue[Connection] = asyncio.Queue()
        self.latencies: list[float] = []

    async def play(self, count: int, *, rate: float) -> None:
        """Play ``count`` conversations; the latency of a call includes a late start."""
        for _ in range(CONNECTIONS):
            connection = Connection(self._url)
            await connection.open()
            self._free.put_nowait(connection)
        begin = time.perf_counter() + 0.05
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                due = begin + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._visit(number, due))

    async def _visit(self, number: int, due: float) -> None:
        draw = random.Random(f"{self._seed}-{number}")
        messages = [{"role": "user", "content": f"Question {draw.randrange(1_000)}: " + "and then? " * 40}]
        connection = await self._free.get()
        await connection.call(self._request("/v1/chat/completions", number, {"model": "model", "messages": messages}))
        self.latencies.append(time.perf_counter() - due)
        value = float(draw.random() < LIKES)
        await connection.call(self._request("/conversations/rate", number, {"value": value}))
        await connection.call(self._request("/conversations/end", number))
        self._free.put_nowait(connection)

    def _request(self, path: str, number: int, body: Any = None) -> bytes:
        data = msgspec.json.encode(body) if body else b""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {urlsplit(self._url).netloc}\r\nauthorization: Bearer {self._token}\r\n"
            f"x-agl-conversation-id: {self._seed}-{number}\r\n"
            f"x-agl-user-id: {self._seed}-{number // CONVERSATIONS_EACH}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


async def customers(url: str, token: str, count: int, rate: float, seed: int) -> None:
    """Play customers, and print the latencies of their calls as JSON."""
    playing = Customers(url, token, seed=seed)
    await playing.play(count, rate=rate)
    print(msgspec.json.encode(playing.latencies).decode(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "models":
        asyncio.run(models())
    else:
        url_, token_, count_, rate_, seed_ = sys.argv[2:]
        asyncio.run(customers(url_, token_, int(count_), float(rate_), int(seed_)))
