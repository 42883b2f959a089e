"""From production to training: `rft` imitates conversations that a gateway served and people rated."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import openai

import agl
from agl.algorithms import algorithm
from agl.contracts import POLICY_KEY_ENV, RolloutQuery, Upstream
from agl.schemas import Reward, Span
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings
from agl_run import Quiet, policy
from agl_run.access.tokens import AttemptTokens
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from agl_algo_torch.serving.policy import TorchPolicy

CLIENT = "a-client-token-of-the-tests"
LIKED = (0, 2, 3)
COUNT = 6


async def serve_people(policy: TorchPolicy, url: str) -> list[str]:
    """Serve finished conversations of two turns each; returns the sorted rollout ids of those that people liked."""
    store = SQLiteStore(url)
    service = GatewayService(
        store=store,
        upstreams=[
            Upstream(
                name="llm",
                base_url=policy.base_url,
                model=policy.model_name,
                api_key_env=POLICY_KEY_ENV,
                is_trained=True,
            )
        ],
        tokens=AttemptTokens(b"a secret of these tests"),
        settings=Settings(conversation_idle_s=0.4),
        client_key=CLIENT,
    )
    base_url = f"{await service.start()}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=CLIENT, max_retries=0) as client:
        ends = [await converse(client, store, f"c{number}", is_liked=number in LIKED) for number in range(COUNT)]
    await eventually(partial(nothing_runs, store))
    await service.stop()
    await store.close()
    return sorted(rollout for number, rollout in enumerate(ends) if number in LIKED)


async def nothing_runs(store: SQLiteStore) -> bool:
    return not await store.rollouts(RolloutQuery(status=("running",)))


async def converse(client: openai.AsyncOpenAI, store: SQLiteStore, name: str, *, is_liked: bool) -> str:
    """Make two calls of a conversation, and rate it as its user does; returns the rollout's id."""
    said: list[dict[str, str]] = []
    about: dict[str, str] = {}
    for word in ("a", "b"):
        said.append({"role": "user", "content": word})
        reply = await client.chat.completions.with_raw_response.create(
            model="llm",
            messages=said,  # type: ignore[arg-type]
            max_tokens=4,
            extra_headers={"x-agl-conversation-id": name},
        )
        said.append({"role": "assistant", "content": reply.parse().choices[0].message.content or ""})
        about = dict(reply.headers)
    ids = {"rollout_id": about["x-agl-rollout-id"], "attempt_id": about["x-agl-attempt-id"]}
    thumb = Span(**ids, span_id="a" * 16, name="thumb", reward=Reward(value=float(is_liked), source="human"))
    await store.append_spans([thumb])
    return ids["rollout_id"]


async def solve(task: str) -> float:
    raise AssertionError("nobody runs the agent")


def test_liked_conversations_are_imitated_and_no_agent_runs(
    serve: Callable[..., TorchPolicy], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    url = f"sqlite:///{tmp_path}/served.db"
    liked = asyncio.run(serve_people(serve(), url))

    settings: dict[str, Any] = {"optim": {"lr": 1e-2}, "compute": {"device": "cpu", "threads": 1}}
    trainer = agl.Trainer(
        name="offline",
        store=url,
        folder=tmp_path,
        algorithm=algorithm("rft", tunes="llm", source="experiment:served-conversations", min_reward=0.5, **settings),
        policies={"llm": policy("torch", model=str(model_dir), device="cpu", threads=1)},
        progress=Quiet(),
    )
    result = trainer.fit(solve)

    async def known() -> tuple[dict[str, float], list[str]]:
        store = SQLiteStore(url)
        metrics = {m.name: m.value for m in await store.metrics("offline")}
        rollouts = await store.rollouts(RolloutQuery(experiment="offline"))
        await store.close()
        return metrics, [rollout.rollout_id for rollout in rollouts]

    metrics, own = asyncio.run(known())
    assert {"rft": 1} == result.steps
    assert (len(liked), []) == (metrics["imitated"], own)
    assert (COUNT, COUNT) == (metrics["groups"], metrics["rollouts"])
    assert "llm" in result.resources
    assert result.resources["llm"].startswith("offline-1-rft-")
