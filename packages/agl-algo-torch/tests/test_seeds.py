"""A seed determines the answers of a policy in training, whatever the order of concurrent requests."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.schemas import unpack_ids
from agl_algo_torch.serving.sampling import SamplingParams, draw
from agl_run import Quiet, policy
from agl_store_sqlite._store import SQLiteStore

if TYPE_CHECKING:
    from pathlib import Path

TASKS = [{"text": text} for text in ("one", "two", "three", "four")]


async def talk(task: dict[str, str], llm: agl.LLM) -> float:
    """Run two agents of two turns each at once, with pauses that differ in every run."""

    async def say(name: str, client: openai.AsyncOpenAI) -> int:
        said: list[Any] = [{"role": "user", "content": f"{name} {task['text']}"}]
        for _ in range(2):
            await asyncio.sleep(random.random() / 50)
            answer = await client.chat.completions.create(model=llm.model, messages=said, max_tokens=6)
            said += [{"role": "assistant", "content": answer.choices[0].message.content}, said[0]]
        return len(str(said)) % 3

    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        return float(sum(await asyncio.gather(say("a", client), say("b", client))))


async def written(url: str) -> dict[str, list[list[int]]]:
    """Return the sampled ids of every rollout, sorted, by the rollout's position in the run."""
    store = SQLiteStore(url)
    rollouts = await store.rollouts(RolloutQuery(experiment="seeded"))
    found = {
        rollout.rollout_id.split("-", 2)[2]: sorted(
            unpack_ids(span.call.response_ids) for span in await store.spans(rollout.rollout_id) if span.call
        )
        for rollout in rollouts
    }
    await store.close()
    return found


@pytest.fixture
def model_dir(make_loaded: Any, tmp_path: Path) -> Path:
    made = make_loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def fit(folder: Path, model: Path, *, seed: int, runners: int, fresh: bool = False) -> dict[str, list[list[int]]]:
    folder.mkdir(exist_ok=True)
    store = f"sqlite:///{folder}/runs.db"
    compute = {"device": "cpu", "threads": 1}
    grpo = algorithm("grpo", tunes="llm", steps=1, tasks_per_step=2, group_size=4, compute=compute)
    trainer = agl.Trainer(
        name="seeded",
        algorithm=grpo,
        policies={"llm": policy("torch", model=str(model), threads=1)},
        store=store,
        n_runners=runners,
        folder=folder,
        progress=Quiet(),
        seed=seed,
    )
    trainer.fit(talk, TASKS, fresh=fresh)
    return asyncio.run(written(store))


def test_a_seed_fixes_every_token_of_the_first_step(model_dir: Path, tmp_path: Path) -> None:
    one, other = (fit(tmp_path / f"{n}", model_dir, seed=3, runners=n) for n in (1, 8))
    assert 8 == len(one)
    assert one == other
    group = [ids for place, ids in one.items() if "-00000-" in place]
    assert 4 == len({str(ids) for ids in group}), "the rollouts of a group draw numbers of their own"
    assert one == fit(tmp_path / "8", model_dir, seed=3, runners=4, fresh=True), "a run from the start repeats them"
    assert one != fit(tmp_path / "other", model_dir, seed=4, runners=4)


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    count = 20_000
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    stream = random.Random(0)
    drawn = draw(
        probabilities.log().clamp(min=-1e30).repeat(count, 1),
        [SamplingParams()] * count,
        uniforms=[stream.random() for _ in range(count)],
    )
    shares = torch.bincount(torch.tensor([one.token_id for one in drawn]), minlength=6) / count
    assert 0.0 == float(shares[[0, 2, 5]].sum())
    assert torch.allclose(probabilities, shares, atol=0.015)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.4999999, 1), (0.5, 3), (1.0 - 2**-53, 4)])
def test_no_number_draws_a_token_without_probability(uniform: float, token: int) -> None:
    logits = torch.tensor([[float("-inf"), 0.5, float("-inf"), 0.3, 0.2, float("-inf")]])
    logits[0, [1, 3, 4]] = logits[0, [1, 3, 4]].log()
    (one,) = draw(logits, [SamplingParams()], uniforms=[uniform])
    assert token == one.token_id
