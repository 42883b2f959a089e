"""The policy's endpoints: requests, answers, and the tokens of a conversation."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl.contracts import POLICY_KEY_ENV
from agl.errors import ConfigError
from agl_tinker.policy import TinkerPolicy
from agl_tinker.rendering import ChatText

from .world import KEY, Served, complete

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def serving(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return `serving(work, **settings)`, which runs `work(endpoint)` while a policy serves."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv(POLICY_KEY_ENV, "key-of-the-policies")

    def run(work: Callable[[str], Awaitable[Any]], **settings: Any) -> Any:
        async def body() -> Any:
            policy = TinkerPolicy(name="llm", model=served.name, base_url=served.url, **settings)
            llm = (await policy.start()).llm
            try:
                return await work(llm.endpoint)
            finally:
                await policy.stop()

        return asyncio.run(body())

    return run


@pytest.fixture
def text(model_dir: Path) -> ChatText:
    return ChatText(str(model_dir), parses_tools=True)


def chat(endpoint: str, **body: Any) -> Any:
    given = {"model": "llm", "messages": HELLO, "max_tokens": 8, "logprobs": True, **body}
    return complete(endpoint, "chat/completions", **given)


def test_chat_answers_carry_tokens(serving: Callable[..., Any], text: ChatText) -> None:
    answer = serving(lambda endpoint: chat(endpoint, n=2, seed=3))
    assert text.prompt(HELLO, tools=[], options={}) == answer["prompt_token_ids"]
    assert 2 == len(answer["choices"])
    for choice in answer["choices"]:
        assert "assistant" == choice["message"]["role"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
        assert choice["finish_reason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
    assert answer["logprobs_exact"] is True


def test_stream_says_what_the_whole_answer_says(serving: Callable[..., Any]) -> None:
    async def work(endpoint: str) -> tuple[Any, list[Any]]:
        whole = await chat(endpoint, seed=5)
        headers = {"authorization": f"Bearer {os.environ[POLICY_KEY_ENV]}"}
        body = {"model": "llm", "messages": HELLO, "max_tokens": 8, "seed": 5, "stream": True, "return_token_ids": True}
        body["stream_options"] = {"include_usage": True}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{endpoint}/chat/completions", json=body) as answer,
        ):
            lines = [line for line in (await answer.text()).splitlines() if line]
        assert "data: [DONE]" == lines[-1]
        return whole, [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    whole, (chunk, usage) = serving(work)
    assert whole["choices"][0]["message"]["content"] == chunk["choices"][0]["delta"]["content"]
    assert whole["choices"][0]["token_ids"] == chunk["choices"][0]["token_ids"]
    assert whole["usage"] == usage["usage"]


def test_conversation_continues_its_own_tokens(serving: Callable[..., Any]) -> None:
    async def work(endpoint: str) -> tuple[list[int], list[int]]:
        for seed in range(100):
            first = await chat(endpoint, max_tokens=6, seed=seed)
            content, ids = first["choices"][0]["message"]["content"], first["choices"][0]["token_ids"]
            if "\ufffd" not in content and ids[-1] == 256:  # it is text, and ended as the template ends an answer
                break
        messages = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
        second = await chat(endpoint, messages=messages)
        return [*first["prompt_token_ids"], *ids], second["prompt_token_ids"]

    known, prompt = serving(work)
    assert known == prompt[: len(known)]


def test_remembered_tokens_are_not_tokenised_again(text: ChatText) -> None:
    prompt = text.prompt(HELLO, tools=[], options={})
    odd = text.encode("<|im_start|>")  # one token, which three letters would be several of
    text.remember(prompt, [*text.encode("ok"), *odd])
    again = text.encode(text._decode([*prompt, *text.encode("ok"), *odd]) + " and more")
    assert again[: len(prompt) + 3] == [*prompt, *text.encode("ok"), *odd]


def test_oldest_turns_are_forgotten_beyond_the_limit(text: ChatText, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_tinker.rendering._MOST_TOKENS", 60)
    odd = text.encode("<|im_start|>")
    for letter in ("a", "b", "b"):
        text.remember(text.encode(letter * 20), odd)
    again = [text.encode(f"{letter * 20}{text.token(odd[0])}") for letter in "ab"]
    assert [21, 21] == [len(ids) for ids in again]
    assert 2 == len(text._turns)
    text.remember(text.encode("c" * 20), odd)
    assert 2 == len(text._turns)


def test_tool_calls_are_read(text: ChatText) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    found = text.message(text.encode(f"first\n{call}{call}"), stops=[], has_tools=True)
    assert "first" == found["content"]
    assert [{"name": "add", "arguments": '{"a": 1}'}] * 2 == [one["function"] for one in found["tool_calls"]]
    for broken in ("<tool_call>{", '<tool_call>{"name": 1}</tool_call>', "<tool_call>[]</tool_call>"):
        found = text.message(text.encode(broken), stops=[], has_tools=True)
        assert (broken, None) == (found["content"], found.get("tool_calls"))
    assert "ab" == text.text(text.encode("abSTOPcd"), stops=["STOP"])


def test_arguments_of_calls_reach_the_template_as_objects(text: ChatText) -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}]
    ids = text.prompt(messages, tools=[], options={})
    assert '{"name": "add", "arguments": {"a": 1}}' in text.text(ids)


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"model": "other"}, 404, "this policy has 'llm'"),
        ({"messages": []}, 400, "has no messages"),
        ({"frequency_penalty": 1.0}, 400, "has no frequency_penalty"),
        ({"min_tokens": 4, "stop_token_ids": [7]}, 400, "has no min_tokens, stop_token_ids"),
        ({"top_logprobs": 5}, 400, "has no top_logprobs"),
        ({"max_tokens": 0}, 400, "cannot be read"),
        ({"response_format": {"type": "json_object"}}, 400, "has no response_format"),
        ({"tool_choice": "required"}, 400, "cannot be enforced"),
        ({"max_tokens": 5000}, 400, "This model's context is 512 tokens"),
        ({"temperature": "hot"}, 400, "cannot be read"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only text"),
        ({"top_p": 0.0}, 400, "did not sample"),
    ],
)
def test_requests_are_refused(serving: Callable[..., Any], body: dict[str, Any], status: int, part: str) -> None:
    async def work(endpoint: str) -> None:
        headers = {"authorization": f"Bearer {os.environ[POLICY_KEY_ENV]}"}
        given = {"model": "llm", "messages": HELLO, **body}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{endpoint}/chat/completions", json=given) as answer,
        ):
            assert status == answer.status
            assert part in (await answer.json())["error"]["message"]

    serving(work)


def test_options_that_change_nothing_are_accepted(serving: Callable[..., Any]) -> None:
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0, "best_of": 1, "top_logprobs": 0, "top_k": -1}
    answer = serving(lambda endpoint: chat(endpoint, **neutral, stop_token_ids=[], echo=False))
    assert answer["logprobs_exact"] is True


def test_key_is_asked_for(serving: Callable[..., Any]) -> None:
    async def work(endpoint: str) -> list[int]:
        async with aiohttp.ClientSession() as session:
            urls = [f"{endpoint}/models", f"{endpoint.removesuffix('/v1')}/health"]
            return [(await session.get(url)).status for url in urls]

    assert [401, 200] == serving(work)


def test_tokenizer_that_is_not_there(serving: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer .* cannot be loaded"):
        serving(chat, tokenizer=str(tmp_path))
