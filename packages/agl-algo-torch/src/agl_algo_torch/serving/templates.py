"""Turns chat messages into prompt ids that continue the tokens which the model has sampled.

A client sends messages, not tokens. Tokenising the rendered conversation again may split an earlier answer at other
places than the model did (or lose bytes that were not text). The next prompt then does not extend the last one, and a
trainer must start a new row. `PromptBuilder` therefore stores the text and the ids of recent turns. If the text of a
stored prompt and response is a prefix of the rendered conversation, the builder uses their ids and tokenises only the
rest. Tool calls and plain answers that come back unchanged are rendered as the model wrote them (`WrittenAnswers`),
where the prompt that they answered comes before them unchanged. If the text still differs (the template drops the
reasoning of earlier answers, or the client edited them), the whole conversation is tokenised, and a new row begins.

Pictures stand in the text as one placeholder each, and a stored turn is continued only by a conversation that has the
same pictures so far. The model's modality replaces the placeholders once the ids of the whole conversation are known.

Limit: two conversations with equal text and different ids are distinguished by the ids of their tool calls. Without
tool calls the most recent one is continued.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from agl_algo_torch.serving.codec import REASONING
from agl_algo_torch.serving.pictures import pictures_of, with_placeholders
from agl_algo_torch.serving.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from agl.contracts import Modality
    from agl.schemas import Blob, MediaSpan
    from agl_algo_torch.serving.codec import TextCodec

_LONGEST_TAIL = 24
"""Largest number of characters at a stored prompt's end that are used to find the prompt in a longer text."""

_MOST_SIBLINGS = 64
"""Largest number of responses that are stored for one prompt."""

_MOST_RENDERINGS = 32
"""After this many renderings in search of stored answers that fit, a conversation is rendered without them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        text: The text.
        ids: Its token ids.
        spliced: Number of ids that were copied from earlier turns.
        messages: Number of messages.
        media: The spans of the pictures in the ids.
        blobs: The pictures.
        short_ids: The ids with one placeholder for each picture; empty without pictures.
    """

    text: str
    ids: tuple[int, ...]
    spliced: int = 0
    messages: int = 0
    media: tuple[MediaSpan, ...] = ()
    blobs: tuple[Blob, ...] = field(default=(), repr=False)
    short_ids: tuple[int, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the pictures, in order."""
        return tuple(span.digest for span in self.media)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A stored response and its prompt, both as token ids."""

    text: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    answer: WrittenAnswer | None = None
    digests: tuple[str, ...] = ()

    @property
    def call_ids(self) -> frozenset[str]:
        return frozenset(call_ids(self.answer.message) if self.answer else ())

    @property
    def size(self) -> int:
        return len(self.prompt_ids) + len(self.ids)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The ids of the tool calls of a conversation, and the digests of its pictures in order."""

    calls: set[str]
    digests: tuple[str, ...]

    def has(self, turn: _Turn) -> bool:
        """Return true if the conversation begins with the pictures of a stored turn."""
        return turn.digests == self.digests[: len(turn.digests)]


class PromptBuilder:
    """Builds prompts with one codec, for several threads at once.

    Args:
        codec: Tokenizer and chat template.
        context_length: Largest number of tokens of a prompt. Texts with more characters than that many tokens can have
            are refused.
        max_tokens: Largest number of tokens of stored prompts and responses.
        modality: Reads the pictures of messages; None for a policy of text.
    """

    def __init__(
        self, codec: TextCodec, *, context_length: int, max_tokens: int = 2_000_000, modality: Modality | None = None
    ) -> None:
        self._codec = codec
        self.modality = modality
        self._context_length, self._longest = context_length, context_length * codec.longest_token
        self._lock = threading.Lock()  # of the stored turns
        self._max_tokens = max_tokens
        self._turns: OrderedDict[str, list[_Turn]] = OrderedDict()
        self._answers = WrittenAnswers()
        self._secret = secrets.token_hex(8)  # else a message could hold a mark
        self._n_tokens = 0
        self._tails: dict[str, int] = {}
        self._lengths: Counter[int] = Counter()
        self._tail = min(len(codec.generation_suffix()) or _LONGEST_TAIL, _LONGEST_TAIL)

    def build(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> Prompt:
        """Render and tokenise a conversation, whose last token is directly before the assistant's answer.

        Raises the template's own errors (`jinja2.TemplateError` for refused messages), and WireError if the context
        cannot hold the text or a picture cannot be read.
        """
        plain = [plain_message(message) for message in messages]
        blobs = pictures_of(messages) if self.modality is not None else []
        seen = _Seen({call_id for message in plain for call_id in call_ids(message)}, tuple(b.digest for b in blobs))
        settings = {"tools": list(tools) if tools else None, **options}
        written = self._as_written(plain, settings, seen.digests)
        prompt = self._spliced(written, seen) if written is not None else None
        if prompt is None:
            text = self._codec.render(plain, **settings)
            prompt = self._spliced(text, seen) or Prompt(text, tuple(self._codec.encode(text)))
        return self._expanded(replace(prompt, messages=len(plain)), blobs)

    def _expanded(self, prompt: Prompt, blobs: Sequence[Blob]) -> Prompt:
        """Return the prompt with the tokens of its pictures; a placeholder that a message's text holds is refused."""
        if self.modality is None:
            return prompt
        try:
            ids, media = self.modality.expand(prompt.ids, blobs)
        except ValueError as error:
            raise WireError(str(error), code="unsupported_content", param="messages") from error
        if not media:
            return prompt
        return replace(prompt, ids=tuple(ids), media=media, blobs=tuple(blobs), short_ids=prompt.ids)

    def _as_written(
        self, plain: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], digests: tuple[str, ...]
    ) -> str | None:
        """Render the conversation with stored answers exactly as the model wrote them.

        Returns None if no stored answer is in the conversation, or if the template fails.
        """
        found = self._answers.found(plain, digests)
        for _ in range(_MOST_RENDERINGS):
            if not found:
                return None
            marks = {place: f"[{self._secret}-{place}]" for place in found}
            marked = [
                {"role": "assistant", "content": marks[place]} if place in found else message
                for place, message in enumerate(plain)
            ]
            try:  # a mark hides the tool calls of an answer, which a template may require before their results
                text = self._codec.render(marked, **settings)
            except (TemplateError, TypeError, ValueError, KeyError):
                return None
            for place, answers in found.items():
                joined = _joined(text, marks[place], answers)
                if joined is None:
                    break
                text = joined
            else:
                return text
            # The template renders the prompt of this answer in another way by now; so it renders the answer, too.
            self._answers.drop_calls(found.pop(place))
        return None

    def _spliced(self, text: str, seen: _Seen) -> Prompt | None:
        """Return a prompt with the ids of the longest stored turn that is a prefix of `text`; None without one."""
        self._check(text)
        found = self._find(text, seen)
        if found is None:
            return None
        start, turn = found
        rest = text[start:]
        ids = self._codec.encode(rest)
        if self._codec.decode(ids) != rest:  # a tokenizer may treat the start of a text in a special way
            return None
        known = (*turn.prompt_ids, *turn.ids)
        return Prompt(text, (*known, *ids), len(known))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that is not a conversation, with the tokenizer's special tokens."""
        self._check(text)
        return self._codec.encode(text, add_special_tokens=True)

    def _check(self, text: str) -> None:
        """Raise WireError for a text that is too long for the context in any case; tokenising it could take minutes."""
        if len(text) > self._longest:
            raise WireError(
                f"This model's context is {self._context_length} tokens; the prompt has {len(text)} characters, more "
                f"than the {self._longest} that so many tokens have at most. Shorten the messages.",
                code="context_length_exceeded",
                param="messages",
            )

    def _find(self, text: str, seen: _Seen) -> tuple[int, _Turn] | None:
        """Return the longest stored turn that is a prefix of `text`, as (its end in `text`, turn); None without one."""
        with self._lock:
            for end in self._ends(text):
                turns = [t for t in self._turns.get(text[:end], ()) if text.startswith(t.text, end) and seen.has(t)]
                if turns:
                    self._turns.move_to_end(text[:end])
                    # Siblings may have equal texts and different ids; the ids of their tool calls distinguish them.
                    turn = max(turns, key=lambda t: (len(t.text), len(t.call_ids & seen.calls)))
                    return end + len(turn.text), turn
        return None

    def _ends(self, text: str) -> Iterator[int]:
        """Yield the positions in `text` at which a stored prompt may end, from last to first."""
        found: set[int] = set()
        for tail in self._tails:
            at = text.find(tail)
            while at >= 0:
                if at + len(tail) in self._lengths:  # otherwise a text with many tails would take quadratic time
                    found.add(at + len(tail))
                at = text.find(tail, at + 1)
        return iter(sorted(found, reverse=True))

    def remember(self, prompt: Prompt, ids: Sequence[int], *, message: Mapping[str, Any] | None = None) -> None:
        """Store a response to `prompt`, as token ids, for later turns; of equal texts the most recent one counts.

        `message` is the response as it was sent to the client, in OpenAI's form. When the limit of tokens is exceeded,
        the oldest prompts are removed.
        """
        if not ids:
            return
        text = self._codec.decode(ids)
        answer = self._answer(prompt, text, ids[-1], message) if message is not None else None
        with self._lock:
            self._store(prompt.text, _Turn(text, prompt.short_ids or prompt.ids, tuple(ids), answer, prompt.digests))

    def _store(self, before: str, turn: _Turn) -> None:
        if turn.answer is not None:
            self._answers.add(turn.answer)
        if before not in self._turns:
            tail = before[-self._tail :]
            self._tails[tail] = self._tails.get(tail, 0) + 1
            self._lengths[len(before)] += 1
        siblings = self._turns.setdefault(before, [])
        siblings.insert(0, turn)
        self._n_tokens += turn.size
        self._forget(siblings[_MOST_SIBLINGS:])
        del siblings[_MOST_SIBLINGS:]
        self._turns.move_to_end(before)
        while self._n_tokens > self._max_tokens:
            self._evict()

    def _answer(self, prompt: Prompt, text: str, last: int, message: Mapping[str, Any]) -> WrittenAnswer | None:
        """Return the answer as the model wrote it; None if every template renders `message` with exactly that text."""
        end = self._codec.token_text(last) if last in self._codec.stop_ids else ""
        answer = WrittenAnswer(replace(prompt, blobs=()), text.removesuffix(end), plain_message(message))
        return answer if answer.is_needed else None

    def _evict(self) -> None:
        text, turns = self._turns.popitem(last=False)
        self._forget(turns)
        tail = text[-self._tail :]
        self._lengths[len(text)] -= 1
        if self._lengths[len(text)] == 0:
            del self._lengths[len(text)]
        self._tails[tail] -= 1
        if self._tails[tail] == 0:
            del self._tails[tail]

    def _forget(self, turns: Sequence[_Turn]) -> None:
        self._n_tokens -= sum(turn.size for turn in turns)
        for turn in turns:
            if turn.answer is not None:
                self._answers.remove(turn.answer)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: arguments of tool calls as objects, and content as text.

    Content with pictures is a list of parts.

    Reasoning is in all fields of `REASONING`, whichever the client has sent.
    """
    plain = {key: value for key, value in message.items() if value is not None and key not in REASONING}
    thought = next((text for name in REASONING if isinstance(text := message.get(name), str) and text), "")
    plain |= dict.fromkeys(REASONING, thought) if thought else {}
    plain["content"] = with_placeholders(message) or _text(message.get("content"))
    if plain["role"] == "developer":
        plain["role"] = "system"
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return plain


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    with suppress(ValueError, TypeError):  # arguments that are not JSON text stay as they are
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    return {**call, "function": function}


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer: the text as the model wrote it, without the end token, and the message sent to the client.

    The message has the form of `plain_message`.
    """

    prompt: Prompt
    text: str
    message: Mapping[str, Any]

    @property
    def is_needed(self) -> bool:
        """True if a template may render the message with another text."""
        return bool(call_ids(self.message)) or self.text.strip() != self.text == self.message["content"]

    def follows(self, messages: int, digests: tuple[str, ...]) -> bool:
        """Return true if the answer's prompt has so many messages, and the pictures of a conversation so far."""
        known = self.prompt.digests
        return self.prompt.messages == messages and known == digests[: len(known)]


class WrittenAnswers:
    """Stores answers, and finds them by the ids of their tool calls or by their text.

    The caller must remove every answer that it adds.
    """

    def __init__(self) -> None:
        self._by_call: dict[str, WrittenAnswer] = {}
        self._plain: dict[str, list[WrittenAnswer]] = {}

    def add(self, answer: WrittenAnswer) -> None:
        """Store an answer; the caller removes it later."""
        calls = call_ids(answer.message)
        self._by_call |= dict.fromkeys(calls, answer)
        if not calls:
            self._plain.setdefault(answer.text, []).append(answer)

    def remove(self, answer: WrittenAnswer) -> None:
        """Remove a stored answer."""
        self.drop_calls([answer])
        if not call_ids(answer.message):
            others = [one for one in self._plain.pop(answer.text) if one is not answer]
            self._plain |= {answer.text: others} if others else {}

    def drop_calls(self, answers: Iterable[WrittenAnswer]) -> None:
        """Remove these answers from the index by tool call id."""
        for call_id in (call_id for answer in answers for call_id in call_ids(answer.message)):
            self._by_call.pop(call_id, None)

    def found(
        self, messages: Sequence[Mapping[str, Any]], digests: tuple[str, ...] = ()
    ) -> dict[int, Sequence[WrittenAnswer]]:
        """Return, by message index, the stored answers that an assistant's message may be; other messages are left out.

        A message whose text or tool calls the client has changed matches no answer. `digests` has the pictures.
        """
        replies = ((place, message) for place, message in enumerate(messages) if message["role"] == "assistant")
        found = {i: [one for one in self._of(message) if one.follows(i, digests)] for i, message in replies}
        return {place: answers for place, answers in found.items() if answers}

    def _of(self, message: Mapping[str, Any]) -> Sequence[WrittenAnswer]:
        if not call_ids(message):
            return self._plain.get(message["content"], ())
        answer = next(filter(None, map(self._by_call.get, call_ids(message))), None)
        return [answer] if answer is not None and _contents(answer.message) == _contents(message) else []


def call_ids(message: Mapping[str, Any]) -> list[str]:
    """Return the ids of a message's tool calls."""
    return [call["id"] for call in message.get("tool_calls") or () if call.get("id")]


def _joined(text: str, mark: str, answers: Iterable[WrittenAnswer]) -> str | None:
    """Return a rendered conversation in which an answer replaces the mark and directly follows its prompt.

    Text that the template puts between the two, such as an empty block of reasoning, is dropped: the model's answer
    contains its own. Returns None if the conversation does not start with the prompt of any of the answers.
    """
    head, found, rest = text.partition(mark)
    if not found or mark in rest:
        return None
    return next((one.prompt.text + one.text + rest for one in answers if head.startswith(one.prompt.text)), None)


def _contents(message: Mapping[str, Any]) -> tuple[str, list[tuple[Any, ...]]]:
    calls = [
        (call.get("id"), call["function"].get("name"), call["function"].get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    return message["content"].strip(), calls
