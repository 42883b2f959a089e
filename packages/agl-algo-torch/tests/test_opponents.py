"""A policy in training meets its own past versions, which the policy's server answers with."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any

import openai
import pytest
from msgspec.structs import replace

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery, VersionScore
from agl.errors import ConfigError
from agl.schemas import ResourceVersion, Weights
from agl.stores import MemoryStore
from agl_inspect.records.state import last_versions, load_experiment, load_last_versions, save_progress
from agl_run import Quiet, policy
from agl_run.run.opponents import PastPolicy
from agl_store_sqlite._store import SQLiteStore

if TYPE_CHECKING:
    from pathlib import Path

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def duel(task: str, llm: agl.LLM, rival: agl.LLM) -> float:
    """Let both answer; the reward is an arbitrary function of the answers."""
    said = ""
    for player in (llm, rival):
        with openai.OpenAI(base_url=player.base_url, api_key=player.api_key or "none") as client:
            answer = client.chat.completions.create(
                model=player.model, messages=[{"role": "user", "content": task}], max_tokens=4
            )
        said += answer.choices[0].message.content or ""
    return zlib.crc32(said.encode()) % 1009 / 1008  # hardly ever equal for all answers: each step makes a version


@pytest.fixture
def fit(make_loaded: Any, tmp_path: Path) -> Any:
    """Returns a function that trains `llm` against `rival`, for some steps in all."""
    made = make_loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")

    def run(*, steps: int, of: str = "llm") -> Any:
        settings: dict[str, Any] = {"optim": {"lr": 1e-2}, "compute": {"threads": 1, "device": "cpu"}}
        settings |= {"lora": {"rank": 2}, "tasks_per_step": 1, "group_size": 4, "saving": {"save_every": 1}}
        return agl.Trainer(
            name="duel",
            algorithm=algorithm("grpo", tunes="llm", steps=steps, **settings),
            policies={
                "rival": policy("past", of=of, versions="last:3"),
                "llm": policy("torch", model=str(tmp_path / "model"), threads=1),
            },
            store=f"sqlite:///{tmp_path}/runs.db",
            folder=tmp_path,
            progress=Quiet(),
        ).fit(duel, ["one", "two"], resume=steps > 4)

    return run


async def played(url: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the pinned versions of both players, and the versions that answered, of every rollout in order."""
    store = SQLiteStore(url)
    found: list[tuple[str, str, dict[str, str]]] = []
    for rollout in await store.rollouts(RolloutQuery(mode="train")):
        spans = await store.spans(rollout.rollout_id)
        calls = {span.call.policy: span.call.model_version for span in spans if span.call is not None}
        found.append((rollout.resources["llm"], rollout.resources["rival"], calls))
    for version in await store.resources("rival"):
        assert isinstance(version.resource, Weights)
    await store.close()
    return found


def test_policy_meets_versions_of_itself_from_before_its_last_update(fit: Any, tmp_path: Path) -> None:
    fit(steps=4)
    result = fit(steps=7)
    assert {"grpo": 7} == result.steps

    steps = asyncio.run(played(f"sqlite:///{tmp_path}/runs.db"))[::4]
    order = list(dict.fromkeys(own for own, _, _ in steps))
    assert 7 == len(order)
    for own, rival, calls in steps:
        age = order.index(own) - order.index(rival)
        assert 0 < age <= 3 or own == order[0] == rival
        # A server that has loaded nothing yet calls its weights 0.
        assert {"llm": own, "rival": rival} == calls or own == order[0]
    assert len({rival for _, rival, _ in steps}) > 2


def test_opponent_is_drawn_from_the_best_validated_versions_before_the_live_one() -> None:
    async def pools() -> list[list[str]]:
        store = MemoryStore()
        names = ["v0", "v1", "v2", "v3", "v4"]
        chain = [
            ResourceVersion(name="llm", version=name, parent=parent, resource=agl.LLM(), created_at=0.0)
            for name, parent in zip(names, ["", *names], strict=False)
        ]
        await store.publish(chain)
        scores = {"v0": 0.1, "v1": 0.7, "v2": 0.5, "v4": 0.9}
        found: list[list[str]] = []
        for known in ({}, scores):
            await store.save_scores(
                [
                    VersionScore(name="llm", version=name, mean=mean, low=0.0, high=1.0, n=9, how="validation")
                    for name, mean in known.items()
                ]
            )
            for newest in (chain[4], chain[2]):
                drawn = {
                    (await PastPolicy(name="rival", of="llm", versions="best:2").draw(store, newest, seed=seed)).version
                    for seed in range(20)
                }
                found.append(sorted(drawn))
        return found

    assert [["v2", "v3"], ["v0", "v1"], ["v1", "v2"], ["v0", "v1"]] == asyncio.run(pools())


def test_resumed_run_meets_the_opponent_that_follows_from_its_policy(fit: Any, tmp_path: Path) -> None:
    fit(steps=4)

    async def forget() -> str:
        """Save another opponent as the live one, as a kill between the two publications can; return the right one."""
        store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")
        record = await load_experiment(store, "duel")
        assert record is not None
        right = record.live["rival"]
        wrong = next(one.version for one in await store.resources("rival") if one.version != right)
        stale = {**await load_last_versions(store, record), "rival": wrong}
        others = last_versions("duel", record.run).states({"": stale})
        await save_progress(store, replace(record, live=stale), others=others)
        await store.close()
        return right

    right = asyncio.run(forget())
    fit(steps=5)

    assert right == asyncio.run(played(f"sqlite:///{tmp_path}/runs.db"))[-1][1]


def test_opponent_of_an_unknown_policy_is_refused(fit: Any) -> None:
    with pytest.raises(ConfigError, match=r"\[policy.rival\] of = 'lmm' is no policy .*did you mean 'llm'"):
        fit(steps=1, of="lmm")


def test_opponent_of_a_policy_that_serves_one_version_is_refused() -> None:
    opponent = PastPolicy(name="rival", of="llm")
    with pytest.raises(ConfigError, match=r'\[policy.rival\] of = "llm" needs a policy that serves several versions'):
        opponent.bind(None, None)
