"""Backends that fail, clients that disconnect, and the load of many calls at once."""

import asyncio
import time

import aiohttp
import openai
import pytest

from agl.contracts import Upstream
from agl.schemas import unpack_ids
from agl_testing.model_server import Cut, Garbage, Reply, Stall, Status
from agl_testing.waiting import eventually

MESSAGES = [{"role": "user", "content": "hi"}]


async def ask(client, **settings):
    return await client.chat.completions.create(model="main_llm", messages=MESSAGES, **settings)


async def test_backend_errors_pass_unchanged_and_are_recorded(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Status(code=429, retry_after=3, message="too many"), Status(code=500, message="broken"))
        async with it.openai(token) as client:
            with pytest.raises(openai.RateLimitError) as limited:
                await ask(client)
            with pytest.raises(openai.InternalServerError):
                await ask(client)
        assert "3" == limited.value.response.headers["retry-after"]
        assert it.server.calls[0].sent == limited.value.response.content
        first, second = await it.calls(attempt_id)
        assert (429, "HTTP 429: too many") == (first.status_code, first.error)
        assert (500, "HTTP 500: broken") == (second.status_code, second.error)
        assert "no answer" in first.ids_missing


async def test_client_retries_share_one_request_id(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Status(code=500), Reply(text="fine"))
        async with it.openai(token, max_retries=2) as client:
            await ask(client)
            await ask(client)
        failed, retried, other = await it.calls(attempt_id)
        assert failed.request_id == retried.request_id
        assert (0, 1) == (failed.retry_count, retried.retry_count)
        assert other.request_id != retried.request_id


@pytest.mark.parametrize("dialect_path", ["chat/completions", "messages"])
async def test_stream_that_the_backend_cuts_is_cut_for_the_client_and_recorded_as_incomplete(stage, dialect_path):
    async with stage(native_apis=["messages"]) as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Cut(after_chunks=3, reply=Reply(text="one two three four", chunks=4)))
        body = {"model": "main_llm", "messages": MESSAGES, "stream": True, "max_tokens": 9}
        received = b""
        async with (
            aiohttp.ClientSession(headers={"x-api-key": token}) as session,
            session.post(f"{it.url}/v1/{dialect_path}", json=body) as reply,
        ):
            with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012  # the loop ends by the error
                while True:
                    received += await reply.content.readany()
        assert received == it.server.calls[0].sent
        (call,) = await it.calls(attempt_id)
        assert not call.is_complete
        assert "broke off" in call.error
        assert call.is_streamed


async def test_partial_stream_keeps_the_tokens_that_came(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Cut(after_chunks=3, reply=Reply(text="abcdef", chunks=6)))
        async with it.openai(token) as client:
            with pytest.raises((openai.APIError, Exception)):
                async for _ in await ask(client, stream=True):
                    pass
        (call,) = await it.calls(attempt_id)
        assert 2 == len(unpack_ids(call.response_ids))
        assert not call.is_complete


async def test_client_that_leaves_cancels_the_backend_and_is_recorded(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Reply(text="one two three four five six", chunks=6, chunk_delay=0.2))
        async with it.openai(token) as client:
            stream = await ask(client, stream=True)
            await anext(aiter(stream))
            await stream.close()
        await eventually(lambda: it.server.calls[0].is_abandoned)
        (call,) = await it.calls(attempt_id)
        assert not call.is_complete
        assert "client closed" in call.error


async def test_plain_call_that_the_client_gives_up_is_recorded(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Reply(text="late", delay=60))
        async with it.openai(token) as client:
            asked = asyncio.create_task(ask(client))
            await asyncio.to_thread(it.server.wait_for_calls, 1)
            asked.cancel()
            await asyncio.wait([asked])
        await eventually(lambda: it.server.calls[0].is_abandoned)
        calls = await eventually(lambda: it.calls(attempt_id))
        assert "client closed" in calls[0].error


async def test_silent_backend_is_a_504_in_the_dialects_format(stage):
    async with stage(timeout_s=0.3) as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Stall(seconds=5, reply=Reply(text="x")), Stall(seconds=5, reply=Reply(text="x")))
        async with aiohttp.ClientSession(headers={"x-api-key": token}) as session:
            body = {"model": "main_llm", "messages": MESSAGES, "max_tokens": 9}
            async with session.post(f"{it.url}/v1/messages", json=body) as reply:
                answer = await reply.json()
                assert 504 == reply.status
            assert "error" == answer["type"]
            async with session.post(f"{it.url}/v1/chat/completions", json=body) as reply:
                assert "upstream_timeout" == (await reply.json())["error"]["code"]
        calls = await it.calls(attempt_id)
        assert [504, 504] == [call.status_code for call in calls]
        assert "silent for too long" in calls[0].error


async def test_unreachable_backend_is_a_502_after_connect_retries(stage):
    dead = [Upstream(name="main_llm", base_url="http://127.0.0.1:9/v1", is_trained=True)]
    async with stage(upstreams=dead) as it:
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            with pytest.raises(openai.InternalServerError, match="cannot be reached"):
                await ask(client)
        (call,) = await it.calls(attempt_id)
        assert 502 == call.status_code


async def test_garbage_is_relayed_and_recorded_as_unreadable(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Garbage())
        async with aiohttp.ClientSession(headers={"x-api-key": token}) as session:
            body = {"model": "main_llm", "messages": MESSAGES}
            async with session.post(f"{it.url}/v1/chat/completions", json=body) as reply:
                assert it.server.calls[0].sent == await reply.read()
        (call,) = await it.calls(attempt_id)
        assert "not what the API promises" in call.error
        assert call.ids_missing


async def test_backend_without_ids_says_so_and_the_call_still_works(stage, server):
    server._handler._flavour = "plain"
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            answer = await ask(client)
        assert "hello there, how are you?" == answer.choices[0].message.content
        (call,) = await it.calls(attempt_id)
        assert "returned no token ids" in call.ids_missing


async def test_sixty_four_calls_at_once_are_all_recorded_with_their_own_answers(stage):
    async with stage() as it:
        attempts = [await it.open_attempt() for _ in range(8)]
        it.server.respond_with(lambda request: Reply(text=f"echo {request.last_text}"))

        clients = [it.openai(token) for _, token in attempts]

        async def one(number: int) -> None:
            answer = await clients[number % 8].chat.completions.create(
                model="main_llm", messages=[{"role": "user", "content": str(number)}]
            )
            assert f"echo {number}" == answer.choices[0].message.content

        await asyncio.gather(*map(one, range(64)))
        await asyncio.gather(*(client.close() for client in clients))
        for index, (attempt_id, _) in enumerate(attempts):
            calls = await it.calls(attempt_id)
            expected = {str(number) for number in range(64) if number % 8 == index}
            assert expected == {call.request["messages"][0]["content"] for call in calls}
            for call in calls:
                echo = f"echo {call.request['messages'][0]['content']}"
                assert echo == call.response["choices"][0]["message"]["content"]


async def test_several_choices_give_one_span_each(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue((Reply(text="a"), Reply(text="bb"), Reply(text="ccc")))
        async with it.openai(token) as client:
            await ask(client, n=3)
        spans = await it.spans(attempt_id)
        assert [(0, 3), (1, 3), (2, 3)] == [(span.call.choice, span.call.choices) for span in spans]
        assert ["a", "bb", "ccc"] == [span.call.response["choices"][0]["message"]["content"] for span in spans]
        assert [2, 3, 4] == [span.call.response_len for span in spans]
        assert 1 == len({span.call.request_id for span in spans})
        assert 3 == len({span.span_id for span in spans})


async def test_span_hangs_below_the_framework_span_that_the_header_names(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        trace = f"00-{'ab' * 16}-{'12' * 8}-01"
        async with it.openai(token) as client:
            await ask(client, extra_headers={"traceparent": trace})
            await ask(client, extra_headers={"traceparent": trace, "x-agl-span-id": "34" * 8})
            await ask(client, extra_headers={"traceparent": "00-zz-1-01", "x-agl-span-id": "no"})
        first, second, third = await it.spans(attempt_id)
        assert ("ab" * 16, "12" * 8) == (first.trace_id, first.parent_id)
        assert ("ab" * 16, "34" * 8) == (second.trace_id, second.parent_id)
        assert "34" * 8 == second.attributes["agl.framework_span_id"]
        assert third.parent_id is None
        assert ("chat main_llm", "client") == (first.name, first.kind)
        assert "chat" == first.attributes["gen_ai.operation.name"]
        assert ["stop"] == first.attributes["gen_ai.response.finish_reasons"]
        assert first.call.prompt_len == first.attributes["gen_ai.usage.input_tokens"]


async def test_pause_holds_calls_and_resume_lets_them_through_with_the_new_version(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        await it.gateway.resume("main_llm", model_version="v1")
        async with it.openai(token) as client:
            it.server.enqueue(Reply(text="slow", delay=2.0))
            running = asyncio.create_task(ask(client))
            await asyncio.to_thread(it.server.wait_for_calls, 1)
            started = time.monotonic()
            await it.gateway.pause("main_llm", drain_s=60)
            assert 0.2 < time.monotonic() - started < 50
            assert running.done() or await asyncio.wait_for(running, 20)
            held = [asyncio.create_task(ask(client)) for _ in range(10)]
            await asyncio.sleep(0.3)
            assert 1 == len(it.server.calls)
            assert not any(task.done() for task in held)
            await it.gateway.resume("main_llm", model_version="v2")
            await asyncio.gather(*held)
        calls = await it.calls(attempt_id)
        assert ["v1"] + ["v2"] * 10 == [call.model_version for call in calls]


async def test_drain_gives_up_after_its_limit(stage):
    async with stage() as it:
        _, token = await it.open_attempt()
        it.server.enqueue(Reply(text="slow", delay=40.0))
        async with it.openai(token) as client:
            running = asyncio.create_task(ask(client))
            await asyncio.to_thread(it.server.wait_for_calls, 1)
            started = time.monotonic()
            await it.gateway.pause("main_llm", drain_s=0.2)
            assert 0.2 <= time.monotonic() - started < 40.0
            assert not running.done()
            running.cancel()
