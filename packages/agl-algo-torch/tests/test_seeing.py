"""The policy server reads pictures: its log-probabilities are those of one pass over tokens and pixels."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

from agl_algo_torch.learner.model import LoadedModel, load_model
from agl_algo_torch.serving.codec import TextCodec
from agl_algo_torch.serving.policy import TorchPolicy
from agl_algo_torch.serving.sampling import SamplingParams
from agl_algo_torch.serving.sequence import GenerationRequest
from agl_algo_torch.serving.templates import PromptBuilder
from agl_vision.tiny import Family, make_tiny

from .seeing_world import Talk, blob, logprobs, part, picture, said

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILIES: tuple[Family, ...] = ("qwen2-vl", "idefics3")
TURNS = {0: (0, 0, 0), 1: (1, 0, 0), 2: (0, 1, 1), 6: (2, 1, 3)}
"""Pictures of each turn, by their number."""


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: Any, tmp_path_factory: Any) -> LoadedModel:
    folder = make_tiny(tmp_path_factory.mktemp("seeing"), family=request.param, layers=2)
    made = load_model(str(folder), device="cpu")
    with torch.no_grad():  # with weights as small as at first, neither pictures nor positions would matter
        for name, parameter in made.model.named_parameters():
            if parameter.ndim > 1 and "embed_tokens" not in name:
                parameter.mul_(6.0)
    return made


@pytest.fixture(scope="module")
def policy(loaded: LoadedModel) -> Iterator[TorchPolicy]:
    policy = TorchPolicy(name="tiny", model=loaded)
    asyncio.run(policy.start())
    yield policy
    asyncio.run(policy.stop())


@pytest.fixture
def client(policy: TorchPolicy, connect: Any) -> openai.OpenAI:
    return connect(policy)


def pictures(count: int, *, seed: int = 0) -> list[list[bytes]]:
    return [[picture(100 * seed + 10 * turn + i) for i in range(n)] for turn, n in enumerate(TURNS[count])]


@pytest.mark.parametrize("count", TURNS)
def test_logprobs_of_three_turns_equal_one_pass(loaded, client, count):
    Talk(client, pictures(count), name=f"alone {count}").run().check(loaded)


def test_logprobs_equal_one_pass_in_a_batch_of_texts_and_pictures(loaded, client):
    talks = [Talk(client, pictures(n, seed=s), name=f"talk {s} {n}", seed=s) for s in (1, 2) for n in TURNS]
    with ThreadPoolExecutor(len(talks)) as threads:
        for talk in list(threads.map(Talk.run, talks)):
            talk.check(loaded)


def test_conversations_that_differ_only_in_a_picture_share_no_tokens(loaded, client):
    turns = [[[picture(10 * seed + turn, side=16)] for turn in range(3)] for seed in (3, 4)]
    for pictures_of_turns in turns:
        Talk(client, pictures_of_turns, name="same words").run().check(loaded)


def test_turn_of_a_conversation_with_another_picture_is_not_continued(loaded):
    codec = TextCodec(loaded.tokenizer)
    builder = PromptBuilder(codec, context_length=1024, modality=loaded.modality)
    asked = [[{"role": "user", "content": said("same words", picture(seed, side=16))}] for seed in (3, 4)]
    second = builder.build(asked[1], tools=None, options={})
    builder.remember(second, codec.encode("x"))
    more: list[Any] = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    assert 0 == builder.build([*asked[0], *more], tools=None, options={}).spliced
    assert len(second.short_ids) + 1 == builder.build([*asked[1], *more], tools=None, options={}).spliced


def test_same_prompt_uses_the_cache_and_gets_the_same_logprobs(loaded, client):
    for _ in range(2):
        talk = Talk(client, pictures(2, seed=5), name="again").run()
        talk.check(loaded)
    assert talk.answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_pictures_matter(loaded, client):
    talk = Talk(client, pictures(1, seed=6)).run()
    answer = talk.answers[0]
    prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    own = torch.tensor([one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]])
    assert (own - logprobs(loaded, prompt, ids, [], [])).abs().max() > 1e-3


def test_stream_names_the_pictures_in_the_chunk_of_the_prompt(client):
    messages: list[Any] = [{"role": "user", "content": said("look", picture(7))}]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body={"return_token_ids": True}
    ).model_dump()
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, stream=True, extra_body={"return_token_ids": True}
    )
    chunks = [chunk.model_dump() for chunk in stream]
    (first,) = [chunk for chunk in chunks if "prompt_token_ids" in chunk]
    for name in ("prompt_token_ids", "prompt_media", "processor"):
        assert whole[name] == first[name]


def test_tool_results_may_have_pictures(loaded, client):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": "what is there?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [part(picture(8))]},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body={"return_token_ids": True}
    ).model_dump()
    (span,) = answer["prompt_media"]
    placeholder = loaded.model.config.image_token_id
    assert placeholder == answer["prompt_token_ids"][span["offset"]]


def test_picture_tokens_are_never_sampled(loaded, policy):
    with torch.no_grad():
        head = loaded.model.get_output_embeddings().weight
        assert head.shape[0] == policy._engine.vocab_size
    banned = loaded.modality.banned
    logits = policy._engine._allowed(torch.zeros(1, policy._engine.vocab_size))
    assert banned == set(torch.isinf(logits[0]).nonzero()[:, 0].tolist())


def refused(client: openai.OpenAI, content: Any, role: str = "user") -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": role, "content": content}], max_tokens=1)
    return str(caught.value)


def test_marker_in_a_text_is_refused(loaded, client):
    marker = loaded.tokenizer.convert_ids_to_tokens(loaded.model.config.image_token_id)
    assert "2 placeholders" in refused(client, said(f"look {marker}", picture(9)))
    assert "1 placeholders" in refused(client, f"look {marker}")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a PNG"),
        (picture(1)[:-40], "damaged"),
        (b"", "not a PNG"),
    ],
)
def test_file_that_is_no_whole_picture_is_refused(client, data, says):
    assert says in refused(client, [part(data)])


def test_picture_that_is_not_in_the_request_is_refused(client):
    url = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    assert "fetches nothing" in refused(client, [url])
    assert "not base64" in refused(client, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}])


def test_picture_of_the_assistant_is_refused(client):
    assert "only other roles" in refused(client, [part(picture(1))], role="assistant")


def test_text_model_refuses_a_picture_with_the_reason(serve, connect):
    assert "text model" in refused(connect(serve()), [part(picture(1))])


def test_request_that_a_swap_interrupts_keeps_its_positions(loaded, policy):
    ids, media = loaded.modality.expand([1, loaded.model.config.image_token_id, 2], [shown := blob(picture(11))])
    request = GenerationRequest(
        prompt_ids=tuple(ids), max_tokens=40, media=media, blobs=(shown,), params=SamplingParams(seed=1)
    )
    events: list[Any] = []
    policy._engine.submit([request], listeners=[events.append])
    policy._engine.swap(lambda _: None, version="1", drain_s=0.0).result(30)
    while not events:
        policy._engine.swap(lambda _: None, version="2", drain_s=0.0).result(30)
    (done,) = events
    found = torch.tensor([draw.logprob for draw in done.draws])
    assert (found - logprobs(loaded, ids, done.token_ids, [shown], media)).abs().max() < 1e-5
