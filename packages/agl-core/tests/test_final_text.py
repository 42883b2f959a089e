from typing import Any

import msgspec
import pytest

from agl.episodes import final_text
from agl.schemas import Span
from tests.cases import agent_span, call_span


def chat(number: int, text: str | None, **fields: Any) -> Span:
    response = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    request = {"messages": [{"role": "user", "content": "question"}]}
    return with_bodies(call_span(number, **fields), request, response)


def with_bodies(span: Span, request: object, response: object) -> Span:
    assert span.call is not None
    return msgspec.structs.replace(span, call=msgspec.structs.replace(span.call, request=request, response=response))


def test_final_text_is_the_last_complete_answer_that_has_text() -> None:
    spans = [
        agent_span("a"),
        chat(1, "first"),
        chat(2, "second"),
        chat(3, None),
        chat(4, "cut", is_complete=False),
        chat(5, "failed", status_code=500),
        chat(6, "late", is_late=True),
    ]
    assert "second" == final_text(spans[::-1])


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}


@pytest.mark.parametrize(
    ("dialect", "response"),
    [
        ("completions", {"choices": [{"text": "hi"}]}),
        ("messages", {"content": [{"type": "text", "text": "hi"}]}),
        (
            "responses",
            {"output": [MESSAGE]},
        ),
    ],
)
def test_final_text_reads_every_dialect(dialect: str, response: object) -> None:
    span = with_bodies(call_span(1, dialect=dialect), {}, response)
    assert "hi" == final_text([span])


def test_final_text_of_nothing_is_empty() -> None:
    assert "" == final_text([])
    assert "" == final_text([with_bodies(call_span(1, dialect="embeddings"), {"input": "x"}, {"data": []})])
