"""Requests cannot run code or block the server, and are refused without the key."""

import asyncio
import gzip
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from agl.contracts import POLICY_KEY_ENV
from agl_algo_torch.learner.model import LoadedModel
from agl_algo_torch.serving.codec import TextCodec
from agl_algo_torch.serving.policy import TorchPolicy
from agl_algo_torch.serving.prompting import PromptThreads
from agl_algo_torch.serving.templates import PromptBuilder
from agl_testing.waiting import stopwatch

Serve = Callable[..., TorchPolicy]
Connect = Callable[[TorchPolicy], Any]
Make = Callable[..., LoadedModel]

HELLO = [{"role": "user", "content": "hello"}]
SLOW = "{% for a in range(40) %}{% for b in range(50000) %}{% endfor %}{% endfor %}"
SLOW_FOR_SLOW = "{% if messages[0].content == 'slow' %}" + SLOW.replace("40)", "400)") + "{% endif %}{{ mood }}hello"
MAX_WAIT_S = 0.5


def chat(client: Any, messages: Any = None, *, options: dict[str, Any] | None = None) -> Any:
    return client.chat.completions.create(
        model="tiny",
        messages=messages or HELLO,
        max_tokens=2,
        extra_body={"chat_template_kwargs": options or {}, "return_token_ids": True},
    )


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "conversation", "tokenize", "tools", "return_dict", "tokenizer_kwargs"]
)
def test_template_and_its_use_are_taken_from_no_request(serve: Serve, connect: Connect, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs has '{name}'") as caught:
        chat(connect(serve()), options={name: SLOW})
    assert f"chat_template_kwargs.{name}" == caught.value.param


def test_template_that_is_a_field_of_the_request_is_refused(serve: Serve, connect: Connect) -> None:
    body = {"model": "tiny", "messages": HELLO, "chat_template": SLOW}
    with pytest.raises(openai.BadRequestError, match="'chat_template' is not supported"):
        connect(serve()).post("/chat/completions", body=body, cast_to=object)


def test_variables_of_the_template_are_plain_text(make_loaded: Make, serve: Serve, connect: Connect) -> None:
    loaded = make_loaded()
    loaded.tokenizer.chat_template = SLOW_FOR_SLOW
    answer = chat(connect(serve(loaded)), options={"mood": "{{ 7 * 7 }}"}).model_dump()
    assert "{{ 7 * 7 }}hello" == loaded.tokenizer.decode(answer["prompt_token_ids"])


@pytest.mark.parametrize("key", ["", "wrong", "\u00e9"])
def test_request_without_the_key_is_refused(serve: Serve, key: str) -> None:
    policy = serve()

    async def ask(path: str) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{policy.base_url}{path}") as got,
        ):
            return got.status, await got.text()

    for path in ("/models", "/chat/completions", "/nowhere"):
        status, text = asyncio.run(ask(path))
        assert (401, "invalid_api_key") == (status, json.loads(text)["error"]["code"])
    assert POLICY_KEY_ENV in text


def test_compressed_request_is_refused_and_not_inflated(serve: Serve) -> None:
    policy = serve()

    async def ask() -> int:
        headers = {"Authorization": f"Bearer {os.environ[POLICY_KEY_ENV]}", "Content-Encoding": "gzip"}
        body = gzip.compress(b"[" * 10**8, 1)
        async with (
            aiohttp.ClientSession(headers=headers, auto_decompress=False) as session,
            session.post(f"{policy.base_url}/chat/completions", data=body) as got,
        ):
            return got.status

    assert 415 == asyncio.run(ask())


def test_slow_prompt_ends_at_its_limit_and_holds_up_no_answer(
    make_loaded: Make, serve: Serve, connect: Connect
) -> None:
    loaded = make_loaded()
    loaded.tokenizer.chat_template = SLOW_FOR_SLOW
    policy = serve(loaded, prompt_s=0.3)

    async def probe() -> float:
        async with aiohttp.ClientSession() as session:
            watch = stopwatch()
            async with session.get(policy.base_url.replace("/v1", "/health")) as got:
                await got.read()
            return watch()

    async def ask() -> list[float]:
        client = connect(policy)
        slow = asyncio.create_task(asyncio.to_thread(chat, client, [{"role": "user", "content": "slow"}]))
        waits: list[float] = []
        while not slow.done():
            waits.append(await probe())
            await asyncio.sleep(0.05)
        with pytest.raises(openai.InternalServerError, match=r"took longer than 0\.3 s") as caught:
            await slow
        assert 503 == caught.value.status_code
        return waits

    assert max(asyncio.run(ask())) < MAX_WAIT_S
    deadline = time.monotonic() + 30
    while True:  # the thread goes on with the slow prompt, and takes the next one after it
        try:
            assert chat(connect(policy)).choices
            return
        except openai.InternalServerError:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["end"] * 33),
        ("stop", ["e" * 257]),
        ("stop_token_ids", [1] * 1025),
        ("messages", HELLO * 4097),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 257),
    ],
)
def test_request_with_more_parts_than_agents_send_is_refused(
    serve: Serve, connect: Connect, field: str, value: Any
) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 1} | {field: value}
    with pytest.raises(openai.BadRequestError, match="of length <= "):
        connect(serve()).post("/chat/completions", body=body, cast_to=object)


def test_text_that_the_context_cannot_hold_is_refused_before_it_is_tokenised(
    make_loaded: Make, serve: Serve, connect: Connect
) -> None:
    policy = serve(make_loaded(context=64))
    client, text = connect(policy), "x" * (64 * len("<|endoftext|>") + 1)
    with pytest.raises(openai.BadRequestError, match="has 883 characters, more than the 832"):
        chat(client, [{"role": "user", "content": text}])
    with pytest.raises(openai.BadRequestError, match="has 833 characters, more than the 832"):
        client.completions.create(model="tiny", prompt=text)
    with pytest.raises(openai.APIStatusError, match=r"for the model's context of 64 tokens") as caught:
        chat(client, [{"role": "user", "content": text * 2000}])
    assert 413 == caught.value.status_code


def test_prompts_of_one_request_may_have_more_bytes_together_than_a_chat(
    make_loaded: Make, serve: Serve, connect: Connect
) -> None:
    client = connect(serve(make_loaded(context=64)))
    prompts = ["x" * 60] * 2
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "user": "u" * 2**21}
    assert 2 == len(client.post("/completions", body=body, cast_to=object)["choices"])


@pytest.mark.parametrize("temperature", [1e-4, 1e-20])
def test_temperature_close_to_zero_is_served(serve: Serve, connect: Connect, temperature: float) -> None:
    answer = connect(serve()).chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, temperature=temperature, logprobs=True
    )
    assert [0.0, 0.0] == [token.logprob for token in answer.choices[0].logprobs.content]


def test_prompts_of_clients_that_hung_up_leave_threads_to_others() -> None:
    released, begun = threading.Event(), 0

    class Slow:
        def encode(self, text: str) -> list[int]:
            nonlocal begun
            if text == "slow":
                begun += 1
                released.wait(30)
            return [1]

    async def ask() -> None:
        prompts = PromptThreads(Slow(), limit_s=30)  # pyright: ignore[reportArgumentType] - a builder that waits
        try:
            for _ in range(8):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(prompts.encode("slow", attempt="hostile"), 0.02)
            assert [1] == await asyncio.wait_for(prompts.encode("quick", attempt="other"), 10)
            assert 1 == begun
            released.set()
            assert [1] == await prompts.encode("quick", attempt="hostile")
        finally:
            released.set()
            prompts.close()

    asyncio.run(ask())


def test_slow_prompts_of_one_attempt_leave_turns_to_others(make_loaded: Make, serve: Serve, connect: Connect) -> None:
    loaded = make_loaded()
    loaded.tokenizer.chat_template = SLOW_FOR_SLOW.replace("400)", "40)")
    policy = serve(loaded)

    client = connect(policy)

    def ask(content: str, attempt: str) -> str:
        named = client.with_options(default_headers={"x-agl-attempt-id": attempt})
        chat(named, [{"role": "user", "content": content}])
        return attempt

    async def order() -> list[str]:
        slow = [asyncio.to_thread(ask, "slow", "hostile") for _ in range(5)]
        quick = asyncio.to_thread(ask, "quick", "other")
        return [await each for each in asyncio.as_completed([*slow, quick])]

    assert "other" in asyncio.run(order())[:2]


def test_text_of_many_prompt_ends_takes_linear_time(make_loaded: Make) -> None:
    builder = PromptBuilder(TextCodec(make_loaded().tokenizer), context_length=10**6)
    first = builder.build(HELLO, tools=None, options={})
    builder.remember(first, [5, 6])
    many = [{"role": "user", "content": "<|im_start|>assistant\n" * 20_000}]
    watch = stopwatch()
    builder.build(many, tools=None, options={})
    assert watch() < 2.0


def test_many_answers_of_one_attempt_leave_rows_and_places_in_the_queue_to_others(
    serve: Serve, connect: Connect
) -> None:
    policy = serve(max_rows=8, max_waiting=8)
    client = connect(policy)

    def ask(attempt: str, *, n: int, max_tokens: int) -> Any:
        named = client.with_options(default_headers={"x-agl-attempt-id": attempt})
        body = {"ignore_eos": True}
        return named.chat.completions.create(
            model="tiny", messages=HELLO, n=n, max_tokens=max_tokens, extra_body=body, stream=max_tokens > 2
        )

    with ask("other", n=1, max_tokens=900) as first, ask("hostile", n=8, max_tokens=900) as stream:
        next(iter(first))
        next(iter(stream))  # six rows run, two answers wait
        with pytest.raises(openai.RateLimitError, match="at most 8 may wait, and 6 of one attempt"):
            ask("hostile", n=5, max_tokens=900)
        assert ask("other", n=1, max_tokens=2).choices
        assert 2 == policy.health()["waiting"]
