"""Agents that ask five times and wait in between, the model that answers them, and the same agents without agl.

``python -m benchmarks._crowd model`` serves the model and prints its URL; every answer says how long the model took,
so that what an agent waited beyond that is known. ``python -m benchmarks._crowd agents URL COUNT FIRST SECONDS NOTES``
runs agents on one event loop, with nothing between them and the URL. Each agent leaves a line of JSON in the notes.
"""

import asyncio
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from agl.schemas import LLM
from benchmarks._load import Connection, make_body, make_request
from benchmarks.canned import canned_replies

CALLS = 5
MODEL_S = 0.5
"""Seconds that the model takes for an answer."""

_ANSWERS = 64
_TOOK = re.compile(rb'"id":"took-([0-9.]+)-')


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One agent.

    Attributes:
        began: Unix seconds of its first line.
        ended: Unix seconds of its last one.
        beyond_s: Seconds that each of its calls took beyond the model, with everything in between and the agent's own
            event loop.
    """

    began: float
    ended: float
    beyond_s: list[float]


async def live(url: str, token: str, *, number: int, seconds: float) -> Note:
    """Ask and wait for so many seconds in all; agents with other numbers wait at other times."""
    draw = random.Random(number)
    shares = [draw.uniform(0.5, 1.5) for _ in range(CALLS + 1)]
    idle_s = max(0.0, seconds - CALLS * MODEL_S)
    began, beyond = time.time(), []
    connection = Connection(url)
    await asyncio.sleep(idle_s * shares[0] / sum(shares))
    await connection.open()
    for call, share in enumerate(shares[1:]):
        request = make_request(url, token, make_body(number * CALLS + call, is_streamed=False))
        sent = time.perf_counter()
        answer = await connection.answer(request)
        beyond.append(time.perf_counter() - sent - _model_s(answer))
        await asyncio.sleep(idle_s * share / sum(shares))
    connection.close()
    return Note(began=began, ended=time.time(), beyond_s=beyond)


def _model_s(answer: bytes) -> float:
    found = _TOOK.search(answer)
    if found is None:
        raise RuntimeError(f"this is no answer of the model: {answer[:200]!r}")
    return float(found[1])


def keep(note: Note, folder: Path) -> None:
    """Add a note to the file of this process."""
    with (folder / f"{os.getpid()}.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(note) + b"\n")


async def solve(task: dict[str, Any], llm: LLM) -> float:
    """Run as an experiment's agent."""
    note = await live(llm.endpoint, llm.api_key, number=task["number"], seconds=task["seconds"])
    keep(note, Path(task["notes"]))
    return 1.0


async def serve_model() -> None:
    """Answer every call after a while, with 200 tokens to a prompt of 1,000, until the process ends."""
    bodies = [reply.plain.partition(b"\r\n\r\n")[2] for reply in canned_replies(_ANSWERS)]
    rests = [re.sub(rb'^{"id":"[^"]*"', b"", body, count=1) for body in bodies]
    count = 0

    async def handle(request: web.BaseRequest) -> web.Response:
        nonlocal count
        came = time.perf_counter()
        await request.read()
        await asyncio.sleep(MODEL_S)
        count += 1
        opening = b'{"id":"took-%.6f-%d"' % (time.perf_counter() - came, count)
        return web.Response(body=opening + rests[count % _ANSWERS], content_type="application/json")

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


async def run_agents(url: str, count: int, first: int, seconds: float, notes: Path) -> None:
    """Run agents at once."""
    for note in await asyncio.gather(
        *(live(url, "none", number=number, seconds=seconds) for number in range(first, first + count))
    ):
        keep(note, notes)


if __name__ == "__main__":
    if sys.argv[1] == "model":
        asyncio.run(serve_model())
    else:
        url_, count_, first_, seconds_, notes_ = sys.argv[2:]
        asyncio.run(run_agents(url_, int(count_), int(first_), float(seconds_), Path(notes_)))
