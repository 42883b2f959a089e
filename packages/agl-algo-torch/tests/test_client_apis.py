"""Calls by the published clients of Anthropic and OpenAI, through the gateway, train every token of their answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from agl.contracts import POLICY_KEY_ENV, RolloutQuery, Upstream
from agl.episodes import build_episode
from agl.schemas import Rollout, new_rollout_id, unpack_ids
from agl.stores import MemoryStore
from agl_algo_torch.serving.policy import TorchPolicy
from agl_gateway.embedded import EmbeddedGateway
from agl_run.access.tokens import AttemptTokens

SECRET = b"a secret of these tests alone"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
SEED = 5
START = 257
"""The token that begins a turn; a random model samples it too."""

QUESTIONS = ("what is in it?", "and now?")


async def messages(url: str, key: str, *, is_streamed: bool) -> None:
    """Converse for two turns with Anthropic's client."""
    tools = [{"name": "read", "description": "reads a file", "input_schema": SCHEMA}]
    said: list[Any] = []
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            asked: dict[str, Any] = {
                "model": "tiny",
                "max_tokens": 12,
                "extra_body": {"seed": SEED},
                "tools": tools,
                "messages": said,
            }
            if is_streamed:
                async with client.messages.stream(**asked) as stream:
                    found = await stream.get_final_message()
            else:
                found = await client.messages.create(**asked)
            assert found.stop_reason in ("max_tokens", "end_turn")
            said.append({"role": "assistant", "content": [block.model_dump() for block in found.content]})


async def responses(url: str, key: str, *, is_streamed: bool) -> None:
    """Converse for two turns with OpenAI's client."""
    tools = [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}]
    said: list[Any] = []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            asked: dict[str, Any] = {
                "model": "tiny",
                "max_output_tokens": 12,
                "extra_body": {"seed": SEED},
                "tools": tools,
                "input": said,
            }
            if is_streamed:
                *_, last = [event async for event in await client.responses.create(stream=True, **asked)]
                found = last.response
            else:
                found = await client.responses.create(**asked)
            assert found.status in ("incomplete", "completed")
            said += [item.model_dump(exclude_none=True) for item in found.output]


@asynccontextmanager
async def attempt(policy: TorchPolicy) -> AsyncIterator[tuple[EmbeddedGateway, MemoryStore, str, str, str]]:
    """Start a gateway before the policy, and open an attempt with an access token."""
    gateway, store = EmbeddedGateway(), MemoryStore()
    upstream = Upstream(name="tiny", base_url=policy.base_url, api_key_env=POLICY_KEY_ENV, is_trained=True)
    url = await gateway.start(store=store, upstreams=[upstream], secret=SECRET)
    try:
        await store.enqueue([Rollout(rollout_id=new_rollout_id(), task={})])
        (claim,) = await store.claim(worker="test")
        made = claim.attempt
        key = AttemptTokens(SECRET).issue(made.rollout_id, made.attempt_id, expires_at=time.time() + 600)
        yield gateway, store, url, made.attempt_id, key
    finally:
        await gateway.stop()
        await store.close()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("converse", [messages, responses])
def test_published_clients_train_a_policy(serve: Callable[..., TorchPolicy], converse: Any, is_streamed: bool):
    policy = serve()

    async def run() -> Any:
        async with attempt(policy) as (gateway, store, url, attempt_id, key):
            await converse(url, key, is_streamed=is_streamed)
            await gateway.settle(attempt_id)
            (rollout,) = await store.rollouts(RolloutQuery())
            (made,) = await store.attempts(rollout.rollout_id)
            spans = await store.spans(rollout.rollout_id, attempt_id=attempt_id)
            return [span.call for span in spans if span.call], build_episode(rollout, made, spans).rows

    calls, rows = asyncio.run(run())
    assert [("chat", "", 200)] * 2 == [(call.dialect, call.ids_missing, call.status_code) for call in calls]
    assert sum(call.response_len for call in calls) == sum(sum(row.mask) for row in rows) > 0
    first, _ = calls
    is_shown = START not in unpack_ids(first.response_ids)  # clients never see this token, so they cannot return it
    assert (1 if is_shown else 2) == len(rows)
