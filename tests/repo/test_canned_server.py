"""The model server of the benchmarks answers as the scripted server does, plain and streamed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

USER: Any = [{"role": "user", "content": "hi"}]


@contextmanager
def client_of_server(variants: int) -> Iterator[openai.OpenAI]:
    """Run the server with some replies, and give a client of it."""
    command = [sys.executable, "-m", "benchmarks.canned", str(variants)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with openai.OpenAI(base_url=process.stdout.readline().strip(), api_key="k") as client:
                yield client
        finally:
            process.kill()


def test_canned_replies_have_the_usual_size_and_come_in_turn() -> None:
    with client_of_server(2) as client:
        answers: list[Any] = [client.chat.completions.create(model="m", messages=USER) for _ in range(3)]
    assert [(1000, 200)] * 3 == [(len(a.prompt_token_ids), len(a.choices[0].token_ids)) for a in answers]
    assert 200 == len(answers[0].choices[0].logprobs.content)
    assert answers[0].prompt_token_ids != answers[1].prompt_token_ids
    assert answers[0].prompt_token_ids == answers[2].prompt_token_ids


def test_canned_stream_assembles_to_the_plain_answer() -> None:
    with client_of_server(1) as client:
        plain: Any = client.chat.completions.create(model="m", messages=USER)
        chunks: list[Any] = list(client.chat.completions.create(model="m", messages=USER, stream=True))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert plain.choices[0].message.content == "".join(choice.delta.content or "" for choice in choices)
    assert plain.choices[0].token_ids == [token for choice in choices for token in getattr(choice, "token_ids", [])]
