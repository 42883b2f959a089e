"""Puts answers that a client writes back into a prompt as the model wrote them.

A client gets a tool call as an object and may write it back with other white space or key order; the template then
prints it in a third way. Such an answer is recognised by the ids of its calls, which the server made up, and by equal
contents. A plain answer comes back as it was, but many templates trim its white space; it is recognised by its text.
An answer is rendered as a mark, and the mark is replaced by the text that the model wrote.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """The text that the model wrote, its end token left out, and the message that its client got, plain."""

    text: str
    message: Mapping[str, Any]

    @property
    def is_needed(self) -> bool:
        """True for an answer that a template may print in another way."""
        return bool(call_ids(self.message)) or self.text.strip() != self.text == self.message["content"]


class WrittenAnswers:
    """Answers by the ids of their calls or by their text; whoever adds them removes them."""

    def __init__(self) -> None:
        self._by_call: dict[str, WrittenAnswer] = {}
        self._plain: Counter[str] = Counter()
        self._secret = secrets.token_hex(8)  # else a message could hold a mark

    def add(self, answer: WrittenAnswer) -> None:
        """Remember an answer."""
        calls = call_ids(answer.message)
        self._by_call |= dict.fromkeys(calls, answer)
        if not calls:
            self._plain[answer.text] += 1

    def remove(self, answer: WrittenAnswer) -> None:
        """Forget an answer."""
        calls = call_ids(answer.message)
        for call_id in calls:
            self._by_call.pop(call_id, None)
        if not calls:
            self._plain -= Counter([answer.text])

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
        """Return plain messages with a mark in place of each remembered answer, and the marks with their texts.

        An answer whose text or calls the client has changed stays as it came.
        """
        found: list[Mapping[str, Any]] = []
        texts: dict[str, str] = {}
        for message in messages:
            text = self._text_of(message)
            if text:
                mark = f"[{self._secret}-{len(texts)}]"
                texts[mark] = text
                message = {"role": "assistant", "content": mark}
            found.append(message)
        return found, texts

    def _text_of(self, message: Mapping[str, Any]) -> str:
        """Return what the model wrote where the client wrote it; "" for any other message."""
        if message["role"] != "assistant":
            return ""
        if not call_ids(message):
            return message["content"] if message["content"] in self._plain else ""
        answer = next(filter(None, map(self._by_call.get, call_ids(message))), None)
        return answer.text if answer is not None and _contents(answer.message) == _contents(message) else ""


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
