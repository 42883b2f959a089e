"""Prompts sent as the recorded tokens: one row per conversation, and answers like those of the chat endpoint."""

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager, suppress

import aiohttp
import openai
import pytest

from agl.contracts import Upstream
from agl.episodes import build_episode
from agl.errors import PolicyError
from agl.schemas import Attempt, Rollout, unpack_ids
from agl.stores import MemoryStore
from agl_gateway.embedded import EmbeddedGateway
from agl_run.access.tokens import AttemptTokens
from agl_vllm.policy import VLLMPolicy
from agl_vllm.server import LaunchSettings, can_take_tokens
from agl_vllm.settings import VllmSettings
from agl_vllm.turns import Turn, TurnBook

from .conftest import started
from .token_server import Server, encode, render, running

SECRET = b"a secret of these tests"
TURNS = 50
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


@asynccontextmanager
async def serving(base, servers, **settings):
    """Yield a policy attached to running stand-ins, and the model that the policy serves."""
    async with running(servers[0]) as first, running(servers[-1]) as second:
        urls = [first] if len(servers) == 1 else [first, second]
        policy = VLLMPolicy(name="main_llm", model=base.uri, base_url=urls, **settings)
        try:
            yield policy, await policy.start()
        finally:
            await policy.stop()


class Talk:
    """A conversation whose client changes the order and the white space of arguments when it sends them back."""

    def __init__(self, client):
        self.client = client
        self.messages = [{"role": "user", "content": "go"}]
        self.answers = []

    async def turn(self, *, change=None, **options):
        given = {"model": "main_llm", "messages": self.messages, "tools": TOOLS, **options}
        answer = await self.client.chat.completions.create(**given)
        self.answers.append(answer)
        parts = {"role", "content", "tool_calls", "reasoning"}
        message = answer.choices[0].message.model_dump(include=parts, exclude_none=True)
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())), indent=1)
        (change or (lambda _: None))(message)
        called = message.get("tool_calls")
        said = {"role": "tool", "tool_call_id": called[0]["id"]} if called else {"role": "user"}
        self.messages += [message, {**said, "content": "7"}]


@pytest.mark.parametrize(("tokens_in", "rows"), [(True, 1), (False, TURNS)])
def test_fifty_turns_with_calls_written_back_in_another_notation_are_one_row(base, tokens_in, rows):
    server = Server()

    async def run():
        store, gateway = MemoryStore(), EmbeddedGateway()
        async with serving(base, [server], tokens_in=tokens_in) as (policy, served):
            upstream = Upstream(name="main_llm", base_url=served.base_urls[0], model=served.model, is_trained=True)
            url = await gateway.start(store=store, upstreams=[upstream], secret=SECRET)
            try:
                await store.enqueue([Rollout(rollout_id="r", task={})])
                (claim,) = await store.claim(worker="test")
                token = AttemptTokens(SECRET).issue("r", claim.attempt.attempt_id, expires_at=time.time() + 600)
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as client:
                    talk = Talk(client)
                    for _ in range(TURNS):
                        await talk.turn()
                await gateway.settle("r.1")
                return await store.spans("r"), policy.counts()
            finally:
                await gateway.stop()

    spans, counts = asyncio.run(run())
    attempt = Attempt(attempt_id="r.1", rollout_id="r", number=1, worker="w", status="succeeded")
    rollout = Rollout(rollout_id="r", task={}, status="succeeded", attempt_id="r.1")
    episode = build_episode(rollout, attempt, spans)
    assert rows == len(episode.rows)
    assert [unpack_ids(span.call.prompt_ids) for span in spans if span.call] == server.prompts
    if tokens_in:
        sampled = sum(span.call.response_len for span in spans if span.call)
        assert (sampled, {"first": 1, "spliced": TURNS - 1}) == (sum(episode.rows[0].mask), counts)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def test_conversation_with_a_picture_goes_to_the_chat_endpoint_and_lends_its_tokens_to_no_other(base):
    async def act(talk):
        talk.messages[0]["content"] = [PICTURE, {"type": "text", "text": "go"}]
        await talk.turn(**WITH_IDS)
        await talk.turn(**WITH_IDS)
        talk.messages[0]["content"] = "<|image_pad|>go"
        await talk.turn(**WITH_IDS)

    _, counts, server = talked(base, act)
    assert {"options": 2, "first": 1} == counts
    assert 3 == server.paths.count("/v1/chat/completions")


def talked(base, act, *, is_old=False, **settings):
    """Hold a conversation through the relay; return the result of `act`, the relay's counts, and the stand-in."""
    server = Server(is_old=is_old)

    async def run():
        async with serving(base, [server], tokens_in=True, **settings) as (policy, served):
            async with openai.AsyncOpenAI(base_url=served.base_urls[0], api_key="none", max_retries=0) as client:
                found = await act(Talk(client))
            return found, policy.counts()

    return (*asyncio.run(run()), server)


WITH_IDS = {"logprobs": True, "extra_body": {"return_token_ids": True}}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 5}, {"max_tokens": 500}])
@pytest.mark.parametrize("last", ["go on", "plain"])
def test_spliced_answer_is_what_the_chat_endpoint_answers(base, last, options, is_old):
    async def act(talk):
        await talk.turn(**WITH_IDS)
        talk.messages[-1]["content"] = last
        await talk.turn(**WITH_IDS, **options)
        # a prompt that continues nothing goes to the chat endpoint, and here it has the same text
        body = {"model": "main_llm", "messages": talk.messages[:3], "tools": TOOLS, "logprobs": True, **options}
        async with aiohttp.ClientSession() as session:
            url = f"{talk.client.base_url}chat/completions"
            made = {**body, "messages": written_by_the_model(body["messages"]), "return_token_ids": True}
            async with session.post(url, json=made) as reply:
                return talk.answers[-1].model_dump(), await reply.json()

    (spliced, plain), counts, _ = talked(base, act, is_old=is_old)
    assert {"first": 2, "spliced": 1} == counts
    for answer in (spliced, plain):
        for call in answer["choices"][0]["message"]["tool_calls"] or ():
            call["id"] = ""
    (mine,), (its,) = spliced["choices"], plain["choices"]
    expected = [its[name] for name in ("index", "finish_reason", "token_ids")]
    assert expected == [mine[name] for name in ("index", "finish_reason", "token_ids")]
    for name in ("content", "tool_calls"):
        assert its["message"][name] == mine["message"][name]
    assert [e["logprob"] for e in its["logprobs"]["content"]] == [e["logprob"] for e in mine["logprobs"]["content"]]
    assert plain["prompt_token_ids"] == spliced["prompt_token_ids"]
    assert plain["usage"].items() <= spliced["usage"].items()


def written_by_the_model(messages):
    """Return the messages with the model's words as text, for which the template makes the same prompt."""
    text = '<tool_call>{"name":"calc","arguments":{"b":0,"a":"x"}}</tool_call>'
    return [{"role": "assistant", "content": text} if m["role"] == "assistant" else m for m in messages]


def changed_argument(message):
    message["tool_calls"][0]["function"]["arguments"] = '{"a": "x", "b": 9}'


def added_text(message):
    message["content"] = "I call it."


@pytest.mark.parametrize("change", [changed_argument, added_text])
def test_call_that_the_client_changed_is_read_as_it_came(base, change):
    async def act(talk):
        await talk.turn(change=change, **WITH_IDS)
        await talk.turn(**WITH_IDS)
        return talk.messages[:3]

    messages, counts, server = talked(base, act)
    assert {"first": 2} == counts
    assert encode(render(messages)) == server.prompts[-1]


def test_answers_with_reasoning_are_continued_while_the_template_keeps_the_reasoning(base):
    async def act(talk):
        talk.messages[0]["content"] = "think"
        for _ in range(3):
            await talk.turn(**WITH_IDS)
        talk.messages.append({"role": "user", "content": "go on"})  # before which the template drops reasoning
        await talk.turn(**WITH_IDS)
        talk.messages[-2].pop("reasoning")
        await talk.turn(**WITH_IDS)
        return talk.answers

    answers, counts, server = talked(base, act)
    assert {"first": 1, "spliced": 2, "changed": 2} == counts
    for answer, later in zip(answers[:2], server.prompts[1:3], strict=True):
        earlier = [*answer.model_extra["prompt_token_ids"], *answer.choices[0].model_extra["token_ids"]]
        assert earlier == later[: len(earlier)]
    assert b"<think>" not in bytes(token for token in server.prompts[3] if token < 256)


def test_conversation_that_was_changed_before_the_answer_is_text_and_counted(base):
    async def act(talk):
        await talk.turn(**WITH_IDS)
        talk.messages[0]["content"] = "another beginning"
        await talk.turn(**WITH_IDS)
        talk.messages[0]["content"] = "refuse"
        with pytest.raises(openai.BadRequestError, match="template refuses"):
            await talk.turn(**WITH_IDS)
        for options in ({"n": 2}, {"stop": ["7"]}, {"messages": [{**talk.messages[1], "tool_calls": ["calc"]}]}):
            given = {"model": "main_llm", "messages": talk.messages[1:2], **options}
            with suppress(openai.APIError):
                await talk.client.chat.completions.create(**given)

    _, counts, _ = talked(base, act)
    assert {"first": 1, "changed": 1, "template": 1, "options": 3} == counts


def test_cut_answer_is_continued_after_its_last_token(base):
    async def act(talk):
        talk.messages[0]["content"] = "plain"
        await talk.turn(max_tokens=3, **WITH_IDS)
        await talk.turn(**WITH_IDS)

    _, counts, server = talked(base, act)
    assert {"first": 1, "spliced": 1} == counts
    first = [*server.prompts[0], *b"It "]
    assert [*first, *encode("<|im_end|>\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n")] == server.prompts[1]


def test_stream_comes_in_one_piece_with_calls_and_ids(base):
    async def act(talk):
        await talk.turn(**WITH_IDS)
        options = {"tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}, **WITH_IDS}
        stream = await talk.client.chat.completions.create(model="main_llm", messages=talk.messages, **options)
        return [chunk.model_dump() async for chunk in stream]

    (chunk, usage), counts, server = talked(base, act)
    assert {"first": 1, "spliced": 1} == counts
    (choice,) = chunk["choices"]
    assert ("tool_calls", 0, "calc") == (
        choice["finish_reason"],
        choice["delta"]["tool_calls"][0]["index"],
        choice["delta"]["tool_calls"][0]["function"]["name"],
    )
    assert (server.prompts[-1], len(server.prompts[-1])) == (
        chunk["prompt_token_ids"],
        usage["usage"]["prompt_tokens"],
    )


async def test_server_that_cannot_be_reached_hangs_up_here_too(base):
    async with running(Server()) as url:
        policy = VLLMPolicy(name="main_llm", model=base.uri, base_url=url, tokens_in=True)
        served = await policy.start()
    try:
        async with aiohttp.ClientSession() as session:
            for path in ("chat/completions", "completions"):
                with pytest.raises(aiohttp.ServerDisconnectedError):
                    await session.post(f"{served.base_urls[0]}/{path}", json={"model": "main_llm", "messages": []})
    finally:
        await policy.stop()


async def test_server_without_the_option_is_refused_where_it_is_asked_for(base):
    owner = started(base)
    try:
        served = await owner.start()
        policy = VLLMPolicy(name="main_llm", model=base.uri, base_url=served.base_urls[0], tokens_in=True)
        with pytest.raises(PolicyError, match=r"takes no prompts of token ids; start vLLM 0\.32 .*enable-scale-out"):
            await policy.start()
    finally:
        await owner.stop()


def test_started_server_gets_the_option_where_its_vllm_has_it(tmp_path, monkeypatch):
    file = tmp_path / "vllm/entrypoints/launchers/cli_args.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file.write_text("enable_lora: bool = False\n")
    assert not can_take_tokens(sys.executable)
    file.write_text("enable_scale_out: bool = False\n")
    assert can_take_tokens(sys.executable)
    for tokens_in in (False, True):
        how = LaunchSettings(name="m", chosen=VllmSettings(model="m", python="p"), tokens_in=tokens_in)
        assert tokens_in == ("--enable-scale-out" in how.command(model="m", port=1))


def test_oldest_turns_are_forgotten_beyond_the_limit():
    def turn(number):
        message = {"role": "assistant", "content": "same" if number < 2 else f"answer {number}"}
        return Turn(message=message, prompt=f"p{number}", written="same", whole="same", ids=(number,) * 10)

    book = TurnBook(max_tokens=25)
    for number in range(3):
        book.add(turn(number))
    marked = book.marked([turn(0).message])
    assert marked is not None
    assert [turn(1)] == marked.turns
    book.add(turn(3))
    assert book.marked([turn(0).message]) is None
