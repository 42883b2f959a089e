"""The server's endpoints, called by the real openai client."""

import asyncio
import copy
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch

from agl.contracts import POLICY_KEY_ENV
from agl.schemas import ResourceVersion
from agl_algo_torch.learner.checkpoint import save_served
from agl_algo_torch.learner.model import LoadedModel
from agl_algo_torch.serving.policy import TorchPolicy
from agl_testing.waiting import wait_until

Serve = Callable[..., TorchPolicy]
Connect = Callable[[TorchPolicy], Any]
Make = Callable[..., LoadedModel]

HELLO = [{"role": "user", "content": "hello"}]
CALC: dict[str, Any] = {"type": "function", "function": {"name": "calc", "parameters": {}}}
IDS = {"return_token_ids": True}


def chat(client: Any, messages: Any = None, **fields: Any) -> dict[str, Any]:
    extra = {**IDS, **fields.pop("extra_body", {})}
    answer = client.chat.completions.create(
        model="tiny", messages=messages or HELLO, extra_body=extra, **{"max_tokens": 12, **fields}
    )
    return answer.model_dump()


def stream(client: Any, messages: Any = None, **fields: Any) -> list[dict[str, Any]]:
    extra = {**IDS, **fields.pop("extra_body", {})}
    chunks = client.chat.completions.create(
        model="tiny", messages=messages or HELLO, stream=True, extra_body=extra, **{"max_tokens": 12, **fields}
    )
    return [chunk.model_dump() for chunk in chunks]


def content_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    deltas = (c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)
    return "".join(delta["content"] or "" for delta in deltas)


@torch.no_grad()
def recompute(model: Any, prompt_ids: list[int], ids: list[int]) -> list[float]:
    logprobs = model(torch.tensor([prompt_ids + ids])).logits[0].log_softmax(-1)
    return [logprobs[len(prompt_ids) - 1 + i, token].item() for i, token in enumerate(ids)]


def test_an_answer_has_text_ids_logprobs_usage_and_version(make_loaded: Make, serve: Serve, connect: Connect) -> None:
    loaded = make_loaded()
    answer = chat(connect(serve(loaded)), logprobs=True, top_logprobs=2)
    choice = answer["choices"][0]
    text = loaded.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert loaded.tokenizer(text)["input_ids"] == answer["prompt_token_ids"]
    assert loaded.tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["message"]["content"]
    expected = recompute(loaded.model, answer["prompt_token_ids"], choice["token_ids"])
    assert expected == pytest.approx([one["logprob"] for one in choice["logprobs"]["content"]], abs=1e-5)
    assert {2} == {len(one["top_logprobs"]) for one in choice["logprobs"]["content"]}
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert "0" == answer["model_version"]
    assert [{"choice": 0, "version": "0", "start": 0, "end": len(choice["token_ids"])}] == answer["model_versions"]
    assert ("raw_logprobs", True) == (answer["logprobs_mode"], answer["logprobs_exact"])


def test_ids_and_logprobs_come_only_when_asked_for(serve: Serve, connect: Connect) -> None:
    answer = chat(connect(serve()), extra_body={"return_token_ids": False})
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


def test_a_cut_distribution_says_that_its_logprobs_are_not_exact(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    scaled = chat(client, temperature=0.5)
    cut = chat(client, top_p=0.5)
    assert ("temperature_scaled_logprobs", True) == (scaled["logprobs_mode"], scaled["logprobs_exact"])
    assert ("raw_logprobs", False) == (cut["logprobs_mode"], cut["logprobs_exact"])


def test_n_choices_are_separate_samples_that_a_seed_repeats(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    first, second = chat(client, n=4, seed=5), chat(client, n=4, seed=5)
    assert [0, 1, 2, 3] == [choice["index"] for choice in first["choices"]]
    ids = [tuple(choice["token_ids"]) for choice in first["choices"]]
    assert 4 == len(set(ids))
    assert ids == [tuple(choice["token_ids"]) for choice in second["choices"]]
    assert sum(map(len, ids)) == first["usage"]["completion_tokens"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(n: int, serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    fields: dict[str, Any] = {"seed": 11, "n": n, "logprobs": True, "max_tokens": 40}
    whole = chat(client, **fields)
    chunks = stream(client, **fields, stream_options={"include_usage": True})
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choice["message"]["content"] == content_of(chunks, index)
        assert choice["token_ids"] == [i for c in mine for i in c.get("token_ids") or ()]
        values = [one["logprob"] for c in mine if c["logprobs"] for one in c["logprobs"]["content"]]
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(values, abs=1e-5)
        assert choice["finish_reason"] == mine[-1]["finish_reason"]
    final = [chunk for chunk in chunks if chunk.get("model_version")]
    assert n == len(final)


def test_a_stream_arrives_token_by_token(serve: Serve, connect: Connect) -> None:
    policy = serve()
    client = connect(policy)
    chunks = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
    )
    next(iter(chunks))
    assert 1 == policy.health()["running"]
    chunks.close()


def test_a_stop_string_ends_the_text_before_it_also_across_tokens(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    free = chat(client, **fields)
    text = free["choices"][0]["message"]["content"]
    stop = text[20:23]
    for answer in (chat(client, stop=stop, **fields), chat(client, stop=["never there", stop], **fields)):
        choice = answer["choices"][0]
        assert text[: text.index(stop)] == choice["message"]["content"]
        assert "stop" == choice["finish_reason"]
        assert free["choices"][0]["token_ids"][: len(choice["token_ids"])] == choice["token_ids"]
    assert text[: text.index(stop)] == content_of(stream(client, stop=stop, **fields))


def test_completions_take_text_or_ids_and_put_ids_into_the_choice(
    make_loaded: Make, serve: Serve, connect: Connect
) -> None:
    loaded = make_loaded()
    client = connect(serve(loaded))
    ids = loaded.tokenizer("one two")["input_ids"]
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "seed": 1, "logprobs": 1, "extra_body": IDS}
    by_text = client.completions.create(prompt="one two", **fields).model_dump()
    by_ids = client.completions.create(prompt=ids, **fields).model_dump()
    assert ids == by_text["choices"][0]["prompt_token_ids"] == by_ids["choices"][0]["prompt_token_ids"]
    assert by_text["choices"][0]["token_ids"] == by_ids["choices"][0]["token_ids"]
    expected = recompute(loaded.model, ids, by_ids["choices"][0]["token_ids"])
    assert expected == pytest.approx(by_ids["choices"][0]["logprobs"]["token_logprobs"], abs=1e-5)
    chunks = [c.model_dump() for c in client.completions.create(prompt=ids, stream=True, **fields)]
    assert by_ids["choices"][0]["text"] == "".join(c["choices"][0]["text"] for c in chunks)
    assert ids == chunks[0]["choices"][0]["prompt_token_ids"]


def test_completions_take_several_prompts(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    answer = client.completions.create(model="tiny", prompt=[[1, 2], [3]], n=2, max_tokens=2, extra_body=IDS)
    prompts = [choice["prompt_token_ids"] for choice in answer.model_dump()["choices"]]
    assert [[1, 2], [1, 2], [3], [3]] == prompts


def test_models_and_health_name_the_model(serve: Serve, connect: Connect) -> None:
    policy = serve()
    assert ["tiny"] == [model.id for model in connect(policy).models.list()]

    async def health() -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(policy.base_url.replace("/v1", "/health")) as got:
            return await got.json()

    state = asyncio.run(health())
    assert ("ok", "tiny", "0") == (state["status"], state["model"], state["model_version"])


def test_metrics_have_the_sequences_that_run_and_wait_in_all_versions(
    make_loaded: Make, serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    policy = serve()

    async def metrics() -> str:
        headers = {"Authorization": f"Bearer {os.environ[POLICY_KEY_ENV]}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(policy.base_url.replace("/v1", "/metrics")) as got,
        ):
            return await got.text()

    weights = save_served(make_loaded(seed=5), tmp_path)
    asyncio.run(policy.serve_versions([ResourceVersion(name="main_llm", version="other", resource=weights)]))
    assert "policy:num_requests_running 0\npolicy:num_requests_waiting 0\n" == asyncio.run(metrics())
    streams = [
        connect(policy).chat.completions.create(
            model=model, messages=HELLO, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
        )
        for model in ("tiny", "tiny@other")
    ]
    for chunks in streams:
        next(iter(chunks))
    assert "policy:num_requests_running 2\npolicy:num_requests_waiting 0\n" == asyncio.run(metrics())
    for chunks in streams:
        chunks.close()


BAD: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "other"}, 404, "model_not_found", "model"),
    ({"messages": []}, 400, "invalid_request", "messages"),
    ({"messages": "hello"}, 400, "invalid_request", "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "invalid_request", "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "unsupported_content", "messages[0]"),
    ({"temperature": -1}, 400, "invalid_request", "temperature"),
    ({"temperature": "hot"}, 400, "invalid_request", "temperature"),
    ({"top_p": 0}, 400, "invalid_request", "top_p"),
    ({"n": 0}, 400, "invalid_request", "n"),
    ({"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
    ({"max_tokens": 5000}, 400, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, 400, "context_length_exceeded", "messages"),
    ({"frequency_penalty": 0.5}, 400, "unsupported_parameter", "frequency_penalty"),
    ({"guided_json": {}}, 400, "unsupported_parameter", "guided_json"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"tool_choice": "required", "tools": [CALC]}, 400, "unsupported_parameter", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "calc"}}}, 400, "unsupported_parameter", "tool_choice"),
]


def test_bad_requests_are_refused_and_name_the_field(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    for fields, status, code, param in BAD:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 4} | fields
        with pytest.raises(openai.APIStatusError) as caught:
            client.post("/chat/completions", body=body, cast_to=object)
        error = caught.value.body
        assert (status, code, param) == (caught.value.status_code, error["code"], error["param"]), fields
        assert error["message"].endswith((".", ".'")), error


def test_what_changes_nothing_is_accepted(serve: Serve, connect: Connect) -> None:
    chat(
        connect(serve()),
        user="me",
        frequency_penalty=0,
        presence_penalty=0.0,
        parallel_tool_calls=True,
        store=False,
        metadata={"a": "b"},
        response_format={"type": "text"},
        logit_bias={},
    )


def test_garbage_is_answered_in_the_same_form(serve: Serve) -> None:
    base_url = serve().base_url
    access = {"Authorization": f"Bearer {os.environ[POLICY_KEY_ENV]}"}

    async def post(path: str, data: bytes) -> tuple[int, dict[str, Any]]:
        async with aiohttp.ClientSession(headers=access) as session, session.post(base_url + path, data=data) as got:
            return got.status, (await got.json())["error"]

    for path, data, status in (
        ("/chat/completions", b"{not json", 400),
        ("/chat/completions", b"[1]", 400),
        ("/chat/completions", b"\xff\xfe", 400),
        ("/completions", b'{"model": "tiny", "prompt": []}', 400),
        ("/completions", b'{"model": "tiny", "prompt": [99999]}', 400),
        ("/completions", b'{"model": "tiny", "prompt": [true]}', 400),
        ("/nowhere", b"{}", 404),
    ):
        assert (status, "invalid_request_error") == (lambda s, e: (s, e["type"]))(*asyncio.run(post(path, data)))


def test_a_template_that_refuses_messages_is_a_400(make_loaded: Make, serve: Serve, connect: Connect) -> None:
    loaded = make_loaded()
    loaded.tokenizer.chat_template = "{{ raise_exception('no tools here') if tools else messages[0].content }}"
    with pytest.raises(openai.BadRequestError, match="no tools here"):
        chat(connect(serve(loaded)), tools=[CALC])


def test_a_template_that_writes_a_token_without_an_embedding_is_a_400(
    make_loaded: Make, serve: Serve, connect: Connect
) -> None:
    loaded = make_loaded()
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    loaded.tokenizer.chat_template = "<|new|>{{ messages[0].content }}"
    with pytest.raises(openai.BadRequestError, match=r"token id \d+, but the model has ids from 0"):
        chat(connect(serve(loaded)))


def test_a_full_queue_is_a_429_that_the_client_may_retry(serve: Serve, connect: Connect) -> None:
    policy = serve(max_rows=1, max_waiting=1)
    client = connect(policy)
    fields: dict[str, Any] = {"max_tokens": 250, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(chat, client, **fields) for _ in range(8)]
        errors = [answer.exception() for answer in answers]
    refused = [error for error in errors if error is not None]
    assert 0 < len(refused) < 8
    for error in refused:
        assert isinstance(error, openai.RateLimitError)
        assert "1" == error.response.headers["retry-after"]


def test_a_client_that_leaves_frees_its_rows(serve: Serve, connect: Connect) -> None:
    policy = serve(max_rows=1)
    client = connect(policy)
    body: dict[str, Any] = {"max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    chunks = client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **body)
    next(iter(chunks))
    chunks.close()
    impatient = client.with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        chat(impatient, **body)
    before = policy.health()["generated_tokens"]
    assert 2 == len(chat(client, max_tokens=2)["choices"][0]["token_ids"])
    wait_until(lambda: 0 == policy.health()["running"])
    assert policy.health()["generated_tokens"] < before + 900


def test_many_clients_at_once_get_answers_that_recompute(make_loaded: Make, serve: Serve, connect: Connect) -> None:
    loaded = make_loaded()
    client = connect(serve(loaded, max_rows=16))

    def one(i: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{i % 5} " * (1 + i % 7)}]
        return chat(client, messages, logprobs=True, max_tokens=5 + i % 20)

    with ThreadPoolExecutor(32) as pool:
        for answer in pool.map(one, range(64)):
            choice = answer["choices"][0]
            expected = recompute(loaded.model, answer["prompt_token_ids"], choice["token_ids"])
            assert expected == pytest.approx([c["logprob"] for c in choice["logprobs"]["content"]], abs=1e-5)


def test_weights_change_under_load_and_nothing_is_dropped(make_loaded: Make, serve: Serve, connect: Connect) -> None:
    versions = {str(seed): make_loaded(seed=seed).model for seed in range(4)}
    policy = serve(make_loaded(seed=0))
    client = connect(policy)

    def one(i: int) -> dict[str, Any]:
        return chat(client, [{"role": "user", "content": f"task {i}"}], logprobs=True, max_tokens=30)

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(one, i) for i in range(96)]
        for version in ("1", "2", "3"):
            wait_until(lambda many=20 * int(version): sum(answer.done() for answer in answers) >= many, every_s=0.002)
            asyncio.run(policy.publish(versions[version].state_dict(), version))
        done = [answer.result() for answer in answers]
    served: set[str] = set()
    for answer in done:
        (span,) = answer["model_versions"]
        served.add(span["version"])
        choice = answer["choices"][0]
        expected = recompute(versions[span["version"]], answer["prompt_token_ids"], choice["token_ids"])
        assert expected == pytest.approx([c["logprob"] for c in choice["logprobs"]["content"]], abs=1e-5)
    assert {"0", "1", "2", "3"} == served
    assert "3" == chat(client)["model_version"]


def test_the_version_is_in_the_header(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    whole = client.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, max_tokens=2)
    streamed = client.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, max_tokens=2, stream=True)
    assert "0" == whole.headers["x-agl-model-version"] == streamed.headers["x-agl-model-version"]
    streamed.parse().close()


def memorise(loaded: LoadedModel, texts: list[str]) -> None:
    """Train until the model repeats the texts by heart."""
    model, tokenizer = loaded.model, loaded.tokenizer
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(300):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 0.1:
            return
    raise AssertionError(f"the model did not learn its dialogue: loss {loss.item()}")


def call(expression: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "calc", "arguments": {"e": expression}}}


DIALOGUE: list[dict[str, Any]] = [
    {"role": "user", "content": "7*8+1?"},
    {"role": "assistant", "content": "", "tool_calls": [call("7*8")]},
    {"role": "tool", "content": "56"},
    {"role": "assistant", "content": "Now add.", "tool_calls": [call("56+1"), call("1")]},
    {"role": "tool", "content": "57"},
    {"role": "assistant", "content": "It is 57."},
]


@pytest.fixture(scope="module")
def calculator(make_loaded: Make) -> LoadedModel:
    """A model that repeats one dialogue with tools by heart."""
    loaded = make_loaded(seed=1)
    text = loaded.tokenizer.apply_chat_template(DIALOGUE, tools=[CALC], tokenize=False)
    memorise(loaded, [text])
    return loaded


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("printed", ['{"name": ', '{ "name":'], ids=["as-written", "in-another-notation"])
def test_prompts_of_a_tool_conversation_extend_one_another(
    is_streamed: bool, printed: str, calculator: LoadedModel, serve: Serve, connect: Connect
) -> None:
    loaded = replace(calculator, tokenizer=copy.deepcopy(calculator.tokenizer))
    loaded.tokenizer.chat_template = loaded.tokenizer.chat_template.replace('{"name": ', printed)
    client = connect(serve(loaded))
    messages: list[Any] = [DIALOGUE[0]]
    known: list[int] = []
    reasons: list[str] = []
    for turn in range(3):
        fields: dict[str, Any] = {"tools": [CALC], "temperature": 0, "max_tokens": 200}
        if is_streamed:
            chunks = stream(client, messages, **fields)
            prompt_ids = chunks[0]["prompt_token_ids"]
            token_ids = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids") or ()]
            deltas = [d for c in chunks for choice in c["choices"] for d in choice["delta"].get("tool_calls") or ()]
            calls = [{k: v for k, v in delta.items() if k != "index"} for delta in deltas]
            assert list(range(len(deltas))) == [delta["index"] for delta in deltas]
            message = {"role": "assistant", "content": content_of(chunks) or None}
            reasons.append(chunks[-1]["choices"][0]["finish_reason"])
        else:
            answer = chat(client, messages, **fields)
            prompt_ids, token_ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
            message = answer["choices"][0]["message"]
            calls = message.pop("tool_calls") or []
            reasons.append(answer["choices"][0]["finish_reason"])
        expected = DIALOGUE[1 + 2 * turn]
        assert (expected["content"] or None) == message["content"]
        wanted = [one["function"]["arguments"] for one in expected.get("tool_calls", [])]
        assert wanted == [json.loads(one["function"]["arguments"]) for one in calls]
        assert known == prompt_ids[: len(known)]
        known = prompt_ids + token_ids
        assert calculator.tokenizer.eos_token_id == known[-1]
        messages.append(message | ({"tool_calls": calls} if calls else {}))
        if turn < 2:
            messages.append({**DIALOGUE[2 + 2 * turn], "tool_call_id": calls[0]["id"]})
    assert ["tool_calls", "tool_calls", "stop"] == reasons


def test_tools_that_may_not_be_used_are_not_shown(calculator: LoadedModel, serve: Serve, connect: Connect) -> None:
    client = connect(serve(calculator))
    shown = chat(client, [DIALOGUE[0]], tools=[CALC])
    hidden = chat(client, [DIALOGUE[0]], tools=[CALC], tool_choice="none")
    plain = chat(client, [DIALOGUE[0]])
    assert plain["prompt_token_ids"] == hidden["prompt_token_ids"]
    assert shown["prompt_token_ids"] != plain["prompt_token_ids"]


def test_sampled_ids_are_kept_where_tokenising_again_would_differ(
    make_loaded: Make, serve: Serve, connect: Connect
) -> None:
    letters = "abcdefgh"
    merges = tuple((left, right) for left in letters for right in letters)
    loaded = make_loaded(merges=merges)
    ids = [loaded.tokenizer.convert_tokens_to_ids(one) for one in [*letters, *(a + b for a, b in merges)]]
    with torch.no_grad():  # nothing but letters and pairs of letters, as single tokens or as pairs
        weights = loaded.model.get_input_embeddings().weight
        mask = torch.ones(len(weights), dtype=torch.bool)
        mask[ids] = False
        direction = weights[ids].mean(0)
        weights[mask] -= 20 * direction
        weights[ids] += 20 * direction
    client = connect(serve(loaded))
    messages: list[Any] = list(HELLO)
    known: list[int] = []
    drifted = 0
    for turn in range(4):
        answer = chat(client, messages, seed=turn, max_tokens=10)
        assert known == answer["prompt_token_ids"][: len(known)]
        sampled = answer["choices"][0]["token_ids"]
        known = answer["prompt_token_ids"] + sampled
        text = answer["choices"][0]["message"]["content"]
        drifted += loaded.tokenizer(text)["input_ids"] != sampled
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    assert drifted > 0
    messages[1] = {"role": "assistant", "content": "edited"}
    edited = chat(client, messages)
    text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert loaded.tokenizer(text)["input_ids"] == edited["prompt_token_ids"]


def test_prompts_are_scored_as_the_model_scores_them(make_loaded: Any, serve: Any, connect: Any) -> None:
    loaded = make_loaded()
    client = connect(serve(loaded))
    ids = loaded.tokenizer("What is 6*7?")["input_ids"]
    extra = {"prompt_logprobs": 0, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=[ids, ids[:4]], max_tokens=1, n=2, extra_body=extra)
    logp = loaded.model(input_ids=torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    expected = [float(logp[i, token]) for i, token in enumerate(ids[1:])]
    for choice, length in zip(answer.choices, (len(ids), len(ids), 4, 4), strict=True):
        first, *rest = choice.prompt_logprobs
        assert first is None
        assert ids[1:length] == [int(token) for entry in rest for token in entry]
        found = [value["logprob"] for entry in rest for value in entry.values()]
        assert expected[: length - 1] == pytest.approx(found, abs=1e-4)


def test_scores_are_refused_where_they_cannot_be_given(serve: Any, connect: Any) -> None:
    client = connect(serve())
    ask = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.completions.create(**ask, extra_body={"prompt_logprobs": 5})
    with pytest.raises(openai.BadRequestError, match="stream = false only"):
        client.completions.create(**ask, stream=True, extra_body={"prompt_logprobs": 0})
