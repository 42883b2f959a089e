"""A conversation is exported once, even if the client rewrites earlier answers when it sends them back."""

from typing import Any

import pytest
from msgspec.structs import replace

from agl.episodes import build_episode
from agl_data.export.dialogues import dialogues
from tests.cases import ATTEMPT, ROLLOUT, call_span

QUESTION = {"role": "user", "name": "ann", "content": "2+3?"}
TOOL = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "5"}
ANSWER = {"role": "assistant", "content": "5"}


def called(arguments: str = '{"a":2,"b":3}', **more: Any) -> dict[str, Any]:
    """Return an answer that calls a tool."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def exported(*conversations: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the dialogues for calls that end with these conversations."""
    spans = [call_span(number) for number in range(len(conversations))]
    for index, (span, (*asked, answer)) in enumerate(zip(spans, conversations, strict=True)):
        body = {"request": {"messages": asked}, "response": {"choices": [{"message": answer}]}}
        spans[index] = replace(span, call=replace(span.call, **body))
    return [line["messages"] for line in dialogues(build_episode(ROLLOUT, ATTEMPT, spans), spans)]


@pytest.mark.parametrize(
    "sent_back",
    [
        called(),
        called(name="helper"),
        called(content="", name=None),
        called('{"a": 2, "b": 3}', name="helper"),
    ],
)
def test_a_turn_whose_answer_was_sent_back_in_other_words_is_part_of_the_next_one(sent_back: dict[str, Any]):
    last = [QUESTION, sent_back, TOOL, ANSWER]
    assert [last] == exported([QUESTION, called()], last)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ({**QUESTION, "name": "bob"}, called()),
        ({**QUESTION, "content": "3+4?"}, called()),
        (QUESTION, called('{"a": 3, "b": 4}')),
        (QUESTION, called('{"a": 2,')),
    ],
)
def test_another_question_or_answer_makes_a_dialogue_of_its_own(question: dict[str, Any], answer: dict[str, Any]):
    first, last = [QUESTION, called()], [question, answer, TOOL, ANSWER]
    assert [first, last] == exported(first, last)
