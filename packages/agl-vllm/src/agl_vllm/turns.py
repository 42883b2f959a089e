"""Remembers answers by their token ids, and finds the turn that a prompt continues.

Clients send tool calls back with other white space or key order, and the template prints them in a third way. So each
remembered answer in a prompt is rendered as a mark, and the mark is then replaced by the text that the model wrote. A
prompt continues a remembered turn if its text begins with that turn's prompt and answer; the rest is new text.

An answer with reasoning gets no mark, because only the template decides whether earlier reasoning stays in a prompt. It
is continued where the template prints it exactly as the model wrote it.

Nothing is guessed: an answer without reasoning is not remembered if its text differs from what its message shows. Such
answers were cut at a stop string, or are plain texts that the server trimmed.
"""

import json
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

Key = tuple[str, str, tuple[tuple[str, str, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A prompt and its answer.

    Attributes:
        message: The answer as the client got it.
        prompt: Text of the prompt.
        written: Text of the answer without its end token.
        whole: Text of the answer with its end token.
        ids: Tokens of prompt and answer.
    """

    message: Mapping[str, Any]
    prompt: str
    written: str
    whole: str
    ids: tuple[int, ...]

    def is_begun_by(self, text: str) -> bool:
        """Return true if the text begins with the prompt and the answer."""
        return text.startswith(self.prompt) and text.startswith(self.whole, len(self.prompt))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A conversation in which a placeholder, the mark, stands for every remembered answer without reasoning.

    Attributes:
        messages: The messages, with marks.
        texts: The text that the model wrote, by mark.
        turns: The turns that the conversation may continue, the latest answer first.
    """

    messages: list[Mapping[str, Any]]
    texts: dict[str, str]
    turns: list[Turn]

    def unmarked(self, text: str) -> str | None:
        """Return the rendered text with the model's text for each mark; None if a mark is lost or repeated."""
        if any(text.count(mark) != 1 for mark in self.texts):
            return None
        for mark, written in self.texts.items():
            text = text.replace(mark, written)
        return text

    def continued(self, text: str) -> Turn | None:
        """Return the latest turn that this text continues; None if there is none."""
        return next((turn for turn in self.turns if turn.is_begun_by(text)), None)


class TurnBook:
    """Remembers the most recent turns; used in one event loop.

    Args:
        max_tokens: The most tokens of prompts and answers to remember; beyond it, the oldest turns are forgotten.
    """

    def __init__(self, *, max_tokens: int = 2_000_000) -> None:
        self._max_tokens = max_tokens
        self._by_key: dict[Key, deque[Turn]] = {}
        self._order: deque[Key] = deque()
        self._n_tokens = 0
        self._secret = secrets.token_hex(8)  # else a message could hold a mark

    def add(self, turn: Turn) -> None:
        """Remember a turn; while the turns exceed the limit of tokens, forget the oldest one."""
        key = _key(turn.message)
        self._by_key.setdefault(key, deque()).appendleft(turn)
        self._order.append(key)
        self._n_tokens += len(turn.ids)
        while self._n_tokens > self._max_tokens:
            self._forget(self._order.popleft())

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> Marked | None:
        """Return the conversation with its remembered answers marked; None if it has no remembered answer."""
        found: list[Mapping[str, Any]] = []
        texts: dict[str, str] = {}
        turns: list[Turn] = []
        for message in messages:
            alike = self._by_key.get(_key(message)) if message.get("role") == "assistant" else None
            if alike:
                turns = [*alike, *turns]
                if not reasoning_of(alike[0].message):
                    mark = f"[{self._secret}-{len(texts)}]"
                    texts[mark] = alike[0].written
                    message = {"role": "assistant", "content": mark}
            found.append(message)
        return Marked(messages=found, texts=texts, turns=turns) if turns else None

    def _forget(self, key: Key) -> None:
        """Forget the oldest turn with this message."""
        alike = self._by_key[key]
        self._n_tokens -= len(alike.pop().ids)
        if not alike:
            del self._by_key[key]


def is_shown(message: Mapping[str, Any], written: str) -> bool:
    """Return true if a message has no reasoning, and holds tool calls or the model's exact text."""
    if reasoning_of(message):
        return False
    return bool(message.get("tool_calls")) or message.get("content") == written


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning next to a message's content; "" for none."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "")


def messages_of(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a request's messages; empty if one holds more than text, which token ids alone cannot express."""
    found = _objects(body.get("messages"))
    return list(found) if found and all(map(_is_text, found)) else []


def _is_text(message: Mapping[str, Any]) -> bool:
    calls = _objects(message.get("tool_calls") or [])
    has_functions = calls is not None and all(isinstance(call.get("function"), dict) for call in calls)
    return isinstance(message.get("content") or "", str) and has_functions


def _objects(value: Any) -> list[dict[str, Any]] | None:
    """Return the value if it is a list of objects, else None."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in cast("list[Any]", value)):
        return None
    return cast("list[dict[str, Any]]", value)


def _key(message: Mapping[str, Any]) -> Key:
    """Return the key of an assistant message: reasoning, content, and tool calls with arguments in canonical JSON."""
    calls = tuple(
        (str(call.get("id")), str(call["function"].get("name")), _canonical(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    )
    content, reasoning = message.get("content") or "", reasoning_of(message).strip()
    return (reasoning, content.strip() if calls or reasoning else content, calls)


def _canonical(arguments: Any) -> str:
    with suppress(ValueError, TypeError):  # arguments that are no JSON are compared as they are
        return json.dumps(json.loads(arguments), sort_keys=True)
    return str(arguments)
