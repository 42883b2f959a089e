"""Puts tool calls that a client writes back into a prompt as the model wrote them.

A client gets a call as an object and may write it back with other white space or key order; the template then prints
it in a third way. An answer is recognised by the ids of its calls, which the server made up, and by equal contents.
It is rendered as a mark in place of a plain answer, and the mark is replaced by the text that the model wrote.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer with tool calls: the text that the model wrote, its end token left out, and what its client got."""

    text: str
    message: Mapping[str, Any]


class WrittenCalls:
    """Answers with tool calls by the ids of their calls; whoever adds them removes them."""

    def __init__(self) -> None:
        self._answers: dict[str, WrittenAnswer] = {}
        self._secret = secrets.token_hex(8)  # else a message could hold a mark

    def add(self, answer: WrittenAnswer) -> None:
        """Remember an answer; its message is plain, as templates get it."""
        self._answers |= dict.fromkeys(call_ids(answer.message), answer)

    def remove(self, ids: Sequence[str]) -> None:
        """Forget the answers with these calls."""
        for call_id in ids:
            self._answers.pop(call_id, None)

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
        """Return plain messages with a mark in place of each remembered answer, and the marks with their texts.

        An answer whose text or calls the client has changed stays as it came.
        """
        found: list[Mapping[str, Any]] = []
        texts: dict[str, str] = {}
        for message in messages:
            answer = next(filter(None, map(self._answers.get, call_ids(message))), None)
            if answer is not None and _contents(answer.message) == _contents(message):
                mark = f"[{self._secret}-{len(texts)}]"
                texts[mark] = answer.text
                message = {"role": "assistant", "content": mark}
            found.append(message)
        return found, texts


def call_ids(message: Mapping[str, Any]) -> list[str]:
    """Return the ids of a message's tool calls."""
    return [call["id"] for call in message.get("tool_calls") or () if call.get("id")]


def unmarked(text: str, texts: Mapping[str, str]) -> str | None:
    """Return a rendered conversation with the texts in place of their marks; None where it lost or repeats one."""
    if any(text.count(mark) != 1 for mark in texts):
        return None
    for mark, written in texts.items():
        text = text.replace(mark, written)
    return text


def _contents(message: Mapping[str, Any]) -> tuple[str, list[tuple[Any, ...]]]:
    calls = [
        (call.get("id"), call["function"].get("name"), call["function"].get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    return message["content"].strip(), calls
