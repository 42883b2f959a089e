"""Tokens that a server adds to messages and responses are recorded, tool calls included, and compaction trains."""

from typing import Any

import aiohttp
import pytest

from agl.contracts import RolloutQuery, Upstream
from agl.episodes import EpisodeCredit, build_episode
from agl.schemas import Reward
from agl.tracing import make_reward_span
from agl_testing.model_server import Reply, ScriptedModelServer, ToolCall, encode

ADD = ToolCall("add", {"a": 1}, "agents")
ASKED = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/messages": {"model": "main_llm", "max_tokens": 64, "messages": [ASKED]},
    "/responses": {"model": "main_llm", "input": "hi"},
}


async def post(it: Any, path: str, token: str, body: Any) -> str:
    headers = {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.post(it.url + path, json=body, headers=headers) as reply:
        assert 200 == reply.status
        return await reply.text()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("endpoint", BODIES)
async def test_tool_calls_of_every_api_are_recorded_with_their_tokens(stage, endpoint: str, is_streamed: bool):
    with ScriptedModelServer(flavour="every") as server:
        server.enqueue(Reply(text="let me see", tool_calls=(ADD,)))
        policy = Upstream(name="main_llm", base_url=server.base_url, model="scripted", is_trained=True)
        async with stage(upstreams=[policy], native_apis=[endpoint.strip("/")]) as it:
            attempt_id, token = await it.open_attempt()
            text = await post(it, f"/v1{endpoint}", token, {**BODIES[endpoint], "stream": is_streamed})
            (call,) = await it.calls(attempt_id)
    assert "" == call.ids_missing
    assert call.response_len == len(call.logprobs) // 4 == len(encode('let me seeadd{"a":1}')) + 3
    assert (endpoint == "/responses") == ('"namespace":"agents"' in text)
    assert "token_ids" not in str(call.response)
    assert "'logprobs': [-" not in str(call.response)


async def test_compaction_starts_a_branch_with_its_rollouts_credit(stage):
    turn = {"model": "main_llm", "messages": [ASKED]}
    answer = {"role": "assistant", "content": "hello there, how are you?"}
    compact = {"role": "user", "content": "summarize the conversation"}
    after = {"role": "user", "content": "a summary: hello there, how are you?"}
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        for messages in ([ASKED], [ASKED, answer, compact], [after], [after, answer, ASKED]):
            await post(it, "/v1/chat/completions", token, {**turn, "messages": messages})
        spans = await it.spans(attempt_id)
        reward = make_reward_span(spans[0].rollout_id, attempt_id, Reward(value=0.5))
        (rollout,) = await it.store.rollouts(RolloutQuery(ids=(attempt_id.rpartition(".")[0],)))
        (attempt,) = await it.store.attempts(rollout.rollout_id)
    episode = build_episode(rollout, attempt, [*spans, reward])
    assert [0, 0, 1, 1] == [one.branch for one in episode.transitions]
    assert 2 == len(episode.rows)
    assert sum(span.call.response_len for span in spans) == sum(sum(row.mask) for row in episode.rows)
    (credits,) = EpisodeCredit().assign([episode])
    assert [0.5] * 4 == [credit.value for credit in credits]
