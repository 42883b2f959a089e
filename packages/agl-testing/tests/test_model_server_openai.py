"""The scripted server as the openai client sees it, plain and streamed."""

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

import httpx2
import openai
import pytest

from agl_testing.model_server import (
    Cut,
    Garbage,
    ModelRequest,
    Reply,
    ScriptedModelServer,
    Stall,
    Status,
    Step,
    ToolCall,
    encode,
    logprob,
)

USER = [{"role": "user", "content": "hi"}]
IDS = {"return_token_ids": True}
TWO_CALLS = (ToolCall("add", {"a": 1}), ToolCall("mul", '{"b": 2}'))


def _client(server: ScriptedModelServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(default=None) as running:
        yield running


@pytest.fixture
def client(server: ScriptedModelServer) -> Iterator[openai.OpenAI]:
    with _client(server) as opened:
        yield opened


def test_chat_plain_gives_text_ids_and_logprobs(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue(Reply(text="hé"))
    answer = client.chat.completions.create(model="m", messages=USER, logprobs=True, extra_body=IDS)
    choice = answer.choices[0]
    assert ("hé", "stop") == (choice.message.content, choice.finish_reason)
    assert [18, *encode("hi"), 1, 19] == answer.prompt_token_ids
    assert [*encode("hé"), 1] == choice.token_ids
    assert [logprob(t, i) for i, t in enumerate(choice.token_ids)] == [e.logprob for e in choice.logprobs.content]
    assert (5, 4) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)


def test_chat_stream_carries_what_the_plain_answer_carries(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue(Reply(text="hello", tool_calls=TWO_CALLS), Reply(text="hello", tool_calls=TWO_CALLS))
    plain = client.chat.completions.create(model="m", messages=USER, logprobs=True, extra_body=IDS)
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=USER,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=IDS,
        )
    )
    assert [plain.prompt_token_ids] == [c.prompt_token_ids for c in chunks if hasattr(c, "prompt_token_ids")]
    assert hasattr(chunks[0], "prompt_token_ids")
    choices = [c.choices[0] for c in chunks if c.choices]
    assert plain.choices[0].token_ids == [t for c in choices for t in getattr(c, "token_ids", [])]
    entries = [e.logprob for c in choices if c.logprobs for e in c.logprobs.content]
    assert [e.logprob for e in plain.choices[0].logprobs.content] == entries
    assert plain.choices[0].finish_reason == choices[-1].finish_reason
    assert plain.usage == chunks[-1].usage


def test_chat_stream_helper_assembles_text_and_parallel_tool_calls(
    server: ScriptedModelServer, client: openai.OpenAI
) -> None:
    server.enqueue(Reply(text="so", tool_calls=TWO_CALLS))
    with client.chat.completions.stream(model="m", messages=USER) as stream:
        message = stream.get_final_completion().choices[0].message
    assert "so" == message.content
    assert [
        ("add", '{"a":1}'),
        ("mul", '{"b": 2}'),
    ] == [(call.function.name, call.function.arguments) for call in message.tool_calls]


def test_chat_conversation_extends_previous_prompt_and_response(
    server: ScriptedModelServer, client: openai.OpenAI
) -> None:
    server.enqueue(Reply(text="let me see", tool_calls=TWO_CALLS), Reply(text="3"))
    first = client.chat.completions.create(model="m", messages=USER, tools=[], extra_body=IDS)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in message.tool_calls]
    history = [*USER, message.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(model="m", messages=history, extra_body=IDS)
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert before == second.prompt_token_ids[: len(before)]
    assert len(before) < len(second.prompt_token_ids)


def test_chat_n_gives_the_scripted_reply_of_each_choice(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue((Reply(text="a"), Reply(text="b", finish_reason="length")))
    answer = client.chat.completions.create(model="m", messages=USER, n=2, extra_body=IDS)
    assert [("a", "stop"), ("b", "length")] == [(c.message.content, c.finish_reason) for c in answer.choices]
    assert [[*encode("a"), 1], encode("b")] == [c.token_ids for c in answer.choices]


def test_sglang_flavour_uses_its_own_names_and_refuses_streams() -> None:
    with (
        ScriptedModelServer(flavour="sglang") as server,
        _client(server) as client,
    ):
        body = {**IDS, "return_prompt_token_ids": True}
        answer = client.chat.completions.create(model="m", messages=USER, extra_body=body)
        assert [*encode("ok"), 1] == answer.choices[0].response_token_ids
        assert [18, *encode("hi"), 1, 19] == answer.choices[0].prompt_token_ids
        assert not hasattr(answer, "prompt_token_ids")
        with pytest.raises(openai.BadRequestError, match="not supported with streaming"):
            client.chat.completions.create(model="m", messages=USER, stream=True, extra_body=IDS)


def test_plain_flavour_ignores_and_openai_flavour_refuses_the_request_for_ids() -> None:
    with ScriptedModelServer(flavour="plain") as server, _client(server) as client:
        answer = client.chat.completions.create(model="m", messages=USER, extra_body=IDS)
        assert not hasattr(answer, "prompt_token_ids")
    with (
        ScriptedModelServer(flavour="openai") as server,
        _client(server) as client,
        pytest.raises(openai.BadRequestError, match="Unrecognized request argument"),
    ):
        client.chat.completions.create(model="m", messages=USER, extra_body=IDS)


def test_completions_take_text_and_ids_and_keep_ids_in_choices(
    server: ScriptedModelServer, client: openai.OpenAI
) -> None:
    server.enqueue(Reply(text="xy"), Reply(text="xy"), (Reply(text="1"), Reply(text="2")))
    plain = client.completions.create(model="m", prompt=encode("ab"), logprobs=1, extra_body=IDS).choices[0]
    assert (encode("ab"), [*encode("xy"), 1]) == (plain.prompt_token_ids, plain.token_ids)
    assert [logprob(t, i) for i, t in enumerate(plain.token_ids)] == plain.logprobs.token_logprobs
    chunks = list(client.completions.create(model="m", prompt="ab", stream=True, extra_body=IDS))
    assert plain.text == "".join(c.choices[0].text for c in chunks)
    assert plain.token_ids == [t for c in chunks for t in c.choices[0].token_ids]
    assert [plain.prompt_token_ids] == [
        c.choices[0].prompt_token_ids for c in chunks if hasattr(c.choices[0], "prompt_token_ids")
    ]
    both = client.completions.create(model="m", prompt=["a", "b"], extra_body=IDS)
    assert [encode("a"), encode("b")] == [c.prompt_token_ids for c in both.choices]


def test_responses_plain_gives_items_and_raw_messages(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue(Reply(text="so", tool_calls=TWO_CALLS))
    answer = client.responses.create(
        model="m",
        input="hi",
        instructions="be brief",
        include=["message.output_text.logprobs"],
        extra_body={"enable_response_messages": True},
    )
    assert "so" == answer.output_text
    assert ["message", "function_call", "function_call"] == [item.type for item in answer.output]
    assert [logprob(t, i) for i, t in enumerate(encode("so"))] == [
        e.logprob for e in answer.output[0].content[0].logprobs
    ]
    assert [16, *encode("be brief"), 1, 18, *encode("hi"), 1, 19] == answer.input_messages[0]["tokens"]
    assert answer.usage.output_tokens == len(answer.output_messages[0]["tokens"])


def test_responses_stream_ends_in_the_plain_answer(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue(Reply(text="hello", tool_calls=TWO_CALLS), Reply(text="cut", finish_reason="length"))
    with client.responses.stream(model="m", input="hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert ["response.created", "response.in_progress", "response.output_item.added"] == kinds[:3]
    assert "response.completed" == kinds[-1]
    assert "hello" == final.output_text
    assert ["add", "mul"] == [item.name for item in final.output if item.type == "function_call"]
    with client.responses.stream(model="m", input="hi") as stream:
        assert "response.incomplete" == [event.type for event in stream][-1]


def test_responses_continue_from_previous_response_id(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue(Reply(text="one"), Reply(text="two"))
    raw = {"enable_response_messages": True}
    first = client.responses.create(model="m", input="hi", extra_body=raw)
    second = client.responses.create(model="m", input="go", previous_response_id=first.id, extra_body=raw)
    before = first.input_messages[0]["tokens"] + first.output_messages[0]["tokens"]
    assert before == second.input_messages[0]["tokens"][: len(before)]


def test_responses_tool_round_trip_extends_the_prompt(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue(Reply(text="so", tool_calls=TWO_CALLS), Reply(text="two"))
    raw = {"enable_response_messages": True}
    first = client.responses.create(model="m", input="hi", extra_body=raw)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in calls]
    items = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output), *results]
    second = client.responses.create(model="m", input=items, extra_body=raw)
    before = first.input_messages[0]["tokens"] + first.output_messages[0]["tokens"]
    assert before == second.input_messages[0]["tokens"][: len(before)]


def test_embeddings_and_models_answer(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    data = client.embeddings.create(model="m", input=["a", "b", "a"]).data
    assert data[0].embedding == data[2].embedding
    assert data[0].embedding != data[1].embedding
    assert ["scripted"] == [model.id for model in client.models.list()]


def test_status_faults_carry_retry_after_and_the_client_retries(server: ScriptedModelServer) -> None:
    server.enqueue(Status(code=429, retry_after=0.01), Status(code=500), Reply(text="third"))
    with _client(server).with_options(max_retries=2) as client:
        assert "third" == client.chat.completions.create(model="m", messages=USER).choices[0].message.content
    assert [429, 500, 200] == [call.status for call in server.calls]
    assert ["0", "1", "2"] == [call.headers["x-stainless-retry-count"] for call in server.calls]


def test_cut_breaks_streams_and_bodies_in_the_middle(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue(Cut(after_chunks=2, reply=Reply(text="abcd")), Cut(reply=Reply(text="abcd")))
    got: list[str] = []
    stream = client.chat.completions.create(model="m", messages=USER, stream=True)
    with pytest.raises((openai.APIError, httpx2.TransportError)):
        got.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert ["", "a"] == got
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=USER)
    assert [False, False] == [call.is_complete for call in server.calls]


def test_stall_holds_the_answer_back_and_is_recorded_as_abandoned(
    server: ScriptedModelServer, client: openai.OpenAI
) -> None:
    server.enqueue(Stall(seconds=60), Stall(seconds=0.2, after_chunks=2, reply=Reply(text="abcd")))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(model="m", messages=USER)
    times = [time.monotonic() for _ in client.chat.completions.create(model="m", messages=USER, stream=True)]
    assert max(b - a for a, b in pairwise(times)) >= 0.15
    assert server.calls[0].is_abandoned
    assert not server.calls[1].is_abandoned


def test_stop_does_not_wait_for_a_stall() -> None:
    with ScriptedModelServer([Stall(seconds=60)]) as server, _client(server) as c:
        with pytest.raises(openai.APITimeoutError):
            c.with_options(timeout=0.1, max_retries=0).chat.completions.create(model="m", messages=USER)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 40


def test_garbage_is_sent_as_written(server: ScriptedModelServer, client: openai.OpenAI) -> None:
    server.enqueue(Garbage(body=b"{]", content_type="application/json"))
    with pytest.raises(Exception, match=r"."):
        client.chat.completions.create(model="m", messages=USER)
    assert b"{]" == server.calls[0].sent


def test_exhausted_script_is_an_error_that_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="no step for call 0"):
        client.chat.completions.create(model="m", messages=USER)


def test_function_sees_turns_of_every_dialect_and_its_errors_surface() -> None:
    seen: list[tuple[str, str]] = []

    def respond(request: ModelRequest) -> Step:
        seen.append((request.dialect, request.last_text))
        if request.last_text == "bad":
            raise KeyError("bad")
        return Reply(text=request.last_text.upper())

    server = ScriptedModelServer(respond=respond).start()
    with _client(server) as client:
        assert "X" == client.responses.create(model="m", input="x").output_text
        assert "Y" == client.completions.create(model="m", prompt="y").choices[0].text
        with pytest.raises(openai.InternalServerError, match="KeyError"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "bad"}])
    with pytest.raises(KeyError, match="bad"):
        server.__exit__(None, None, None)
    assert [("responses", "x"), ("completions", "y"), ("chat", "bad")] == seen


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ((Reply(text="a"), Reply(text="b")), "2 replies for 1 choices"),
        (Reply(text="abc", chunks=("a", "b")), "do not add up"),
    ],
    ids=["choices", "chunks"],
)
def test_mistake_in_a_step_is_told_to_the_client_and_to_the_test(step: Step, told: str) -> None:
    server = ScriptedModelServer([step]).start()
    with _client(server) as client, pytest.raises(openai.InternalServerError, match=told):
        client.chat.completions.create(model="m", messages=USER)
    assert [500] == [call.status for call in server.calls]
    with pytest.raises(ValueError, match=told):
        server.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"content": "of nobody"}]}),
        ("chat/completions", {"messages": USER, "n": -3}),
        ("chat/completions", {"messages": USER, "n": "two"}),
        ("completions", {"prompt": 3}),
        ("responses", {"input": [None]}),
        ("messages", {"messages": {"role": "user"}}),
    ],
)
def test_request_that_the_api_does_not_take_is_refused(server: ScriptedModelServer, path: str, body: object) -> None:
    server.enqueue(Reply(text="for the next request"))
    answer = httpx2.post(f"{server.base_url}/{path}", json=body)
    assert 400 == answer.status_code
    assert "the body is not what this API takes" in answer.json()["error"]["message"]
    served = httpx2.post(f"{server.base_url}/chat/completions", json={"model": "m", "messages": USER})
    assert "for the next request" in served.text


def test_calls_record_headers_bodies_and_the_exact_bytes_sent(
    server: ScriptedModelServer, client: openai.OpenAI
) -> None:
    server.enqueue(Reply(text="hello"))
    raw = client.chat.completions.with_raw_response.create(model="m", messages=USER)
    call = server.wait_for_calls(1)[0]
    assert raw.http_response.content == call.sent
    assert ("/v1/chat/completions", "POST", "Bearer k") == (call.path, call.method, call.headers["authorization"])
    assert USER == call.json["messages"]
    assert call.is_complete
    with pytest.raises(TimeoutError, match="1 of 2 calls"):
        server.wait_for_calls(2, timeout=0.01)


def test_api_key_is_checked_when_given() -> None:
    with ScriptedModelServer(api_key="real") as server:
        for key, expected in (("real", 200), ("forged", 401)):
            with openai.OpenAI(base_url=server.base_url, api_key=key) as client:
                if expected == 401:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()
                else:
                    client.models.list()
        assert [200, 401] == [call.status for call in server.calls]


async def _ask(server: ScriptedModelServer) -> str | None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
        answer = await client.chat.completions.create(model="m", messages=USER)
        return answer.choices[0].message.content


def test_server_serves_async_clients(server: ScriptedModelServer) -> None:
    server.enqueue(Reply(text="a"), Reply(text="b"))

    async def both() -> list[str | None]:
        return list(await asyncio.gather(_ask(server), _ask(server)))

    assert {"a", "b"} == set(asyncio.run(both()))
