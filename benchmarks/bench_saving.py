"""Seconds of a step of ``grpo`` that may wait to be saved, and of one that is saved.

The model is a random Qwen2 of 24 million weights, trained and served in this process; the agent makes one short call.
Each measured run is an experiment of its own, and counts the time from its second step to its last but one: the first
and the last are saved in both. Run alone: ``python -m benchmarks.bench_saving``; it needs agl-algo-torch.
"""

import asyncio
import tempfile
import zlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import openai

import agl
from agl.algorithms import algorithm
from agl_run import Quiet, policy
from agl_store_sqlite import SQLiteStore
from benchmarks._harness import Figure, table
from benchmarks.bench_verl import make_model

TASKS = [{"text": word} for word in ("one", "two", "three", "four")]


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where agl-algo-torch is not installed."""
    if not find_spec("agl_algo_torch"):
        return []
    steps = 4 if quick else 8
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", hidden=512, layers=16, vocabulary=4096)
        measure = partial(seconds_per_step, model, Path(folder), steps=steps)
        saved, waiting = measure(save_every=1), measure(save_every="5%")
    return [
        Figure(
            name="step that may wait to be saved",
            value=waiting,
            unit="s",
            better="lower",
            baseline=saved,
            baseline_name="step that is saved",
        )
    ]


def answer(task: dict[str, str], llm: agl.LLM) -> float:
    """One call; the reward is arbitrary and follows from the answer."""
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        found = client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["text"]}], max_tokens=4
        )
    return zlib.crc32((found.choices[0].message.content or "").encode()) % 5 / 4


def seconds_per_step(model: Path, folder: Path, *, steps: int, save_every: int | str) -> float:
    """Run an experiment, and return what a step takes."""
    work = folder / f"every-{str(save_every).rstrip('%')}"
    work.mkdir()
    url = f"sqlite:///{work}/runs.db"
    grpo = algorithm(
        "grpo",
        tunes="llm",
        steps=steps,
        tasks_per_step=2,
        group_size=4,
        compute={"device": "cpu"},
        saving={"save_every": save_every},
    )
    trainer = agl.Trainer(
        name="bench",
        algorithm=grpo,
        policies={"llm": policy("torch", model=str(model))},
        store=url,
        folder=work,
        progress=Quiet(),
    )
    trainer.fit(answer, TASKS)
    ended = asyncio.run(times_of_steps(url))
    return (ended[steps - 1] - ended[1]) / (steps - 2)


async def times_of_steps(url: str) -> dict[int, float]:
    """The time at which each step's numbers were logged, just before it was saved."""
    store = SQLiteStore(url)
    try:
        return {each.step: each.time for each in await store.metrics("bench", name="reward")}
    finally:
        await store.close()


if __name__ == "__main__":
    print(table(run(quick=False)))
