"""The gateway relays and records all four dialects, plain and streamed."""

import asyncio

import aiohttp
import pytest

from agl.dialects import call_messages
from agl.schemas import unpack_floats, unpack_ids
from agl_testing.model_server import Reply, ToolCall

BODIES = {
    "/chat/completions": {"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]},
    "/completions": {"model": "main_llm", "prompt": "hi"},
    "/responses": {"model": "main_llm", "input": "hi"},
    "/messages": {"model": "main_llm", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]},
}

NATIVE = ["messages", "responses"]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("endpoint", BODIES)
async def test_relay_passes_bytes_unchanged_and_records_the_answer(stage, endpoint, is_streamed):
    async with stage(native_apis=NATIVE) as it:
        attempt_id, token = await it.open_attempt()
        body = {**BODIES[endpoint], "stream": is_streamed}
        async with aiohttp.ClientSession() as session:
            headers = {"authorization": f"Bearer {token}"}
            async with session.post(f"{it.url}/v1{endpoint}", json=body, headers=headers) as reply:
                received = await reply.read()
                assert 200 == reply.status
        backend = it.server.calls[0]
        assert backend.sent == received
        (call,) = await it.calls(attempt_id)
        assert "hello there, how are you?" == call_messages(call)[-1]["content"]
        assert "main_llm" == call.policy
        assert is_streamed == call.is_streamed
        assert call.is_complete
        assert body == call.request
        assert token not in str(backend.headers)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_relay_records_exact_token_ids(stage, is_streamed):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        client = it.openai(token)
        it.server.enqueue(Reply(tool_calls=(ToolCall("add", {"a": 1}), ToolCall("add", {"b": 2}))))
        answer = await client.chat.completions.create(
            model="main_llm", messages=[{"role": "user", "content": "hi"}], stream=is_streamed, logprobs=True
        )
        ids: list[int] = []
        logprobs: list[float] = []
        if is_streamed:
            prompt_ids = None
            async for chunk in answer:
                prompt_ids = prompt_ids or getattr(chunk, "prompt_token_ids", None)
                ids += getattr(chunk.choices[0], "token_ids", None) or []
                if chunk.choices[0].logprobs:
                    logprobs += [entry.logprob for entry in chunk.choices[0].logprobs.content or []]
        else:
            prompt_ids = answer.prompt_token_ids
            ids = answer.choices[0].token_ids
            logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content]
        (call,) = await it.calls(attempt_id)
        assert prompt_ids == unpack_ids(call.prompt_ids)
        assert ids == unpack_ids(call.response_ids)
        assert pytest.approx(logprobs) == unpack_floats(call.logprobs)
        assert "" == call.ids_missing
        assert ["add", "add"] == [item["function"]["name"] for item in call_messages(call)[-1]["tool_calls"]]
        assert "tool_calls" == call.finish_reason
        await client.close()


async def test_relay_streams_the_first_chunk_before_the_last_is_sent(stage):
    async with stage() as it:
        _, token = await it.open_attempt()
        it.server.enqueue(Reply(text="one two three", chunks=3, chunk_delay=0.3))
        client = it.openai(token)
        stream = await client.chat.completions.create(
            model="main_llm", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        first = await anext(aiter(stream))
        assert first.choices
        assert not it.server.calls[0].is_complete
        await stream.close()
        await client.close()
        await asyncio.sleep(0)
