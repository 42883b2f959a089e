"""The model server of the benchmarks answers like the scripted server, over one connection and over many."""

import openai
import pytest

from benchmarks.canned import CannedModelServer, CannedReply

USER = [{"role": "user", "content": "hi"}]


def test_canned_reply_has_the_tokens_that_were_asked_for() -> None:
    replies = [CannedReply.chat(prompt_tokens=100, response_tokens=20, seed=seed) for seed in range(2)]
    with CannedModelServer(replies) as server, openai.OpenAI(base_url=server.base_url, api_key="k") as client:
        answers = [client.chat.completions.create(model="m", messages=USER) for _ in range(3)]
        assert 3 == server.call_count
    assert [(100, 20)] * 3 == [(len(a.prompt_token_ids), len(a.choices[0].token_ids)) for a in answers]
    assert 20 == len(answers[0].choices[0].logprobs.content)
    assert answers[0].prompt_token_ids != answers[1].prompt_token_ids
    assert answers[0].prompt_token_ids == answers[2].prompt_token_ids


def test_canned_stream_assembles_to_the_plain_answer() -> None:
    with CannedModelServer() as server, openai.OpenAI(base_url=server.base_url, api_key="k") as client:
        plain = client.chat.completions.create(model="m", messages=USER)
        chunks = list(client.chat.completions.create(model="m", messages=USER, stream=True))
    assert plain.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert plain.choices[0].token_ids == [
        t for c in chunks if c.choices for t in getattr(c.choices[0], "token_ids", [])
    ]


def test_port_in_use_is_an_error() -> None:
    with CannedModelServer() as server:
        taken = int(server.base_url.split(":")[2].split("/")[0])
        with pytest.raises(OSError, match="address already in use"):
            CannedModelServer(port=taken).start()
