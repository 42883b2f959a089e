"""Turns text into tokens and back, from several threads at once, and finds stop strings in growing text.

A fast tokenizer must not be changed while another thread uses it (it raises "Already borrowed"), so the codec has its
own copy, which nothing changes.
"""

from __future__ import annotations

import copy
import inspect
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the message fields in which chat templates look for an answer's reasoning."""

_FORMS: tuple[tuple[str | None, bool], ...] = (("", False), (None, False), ("", True), (None, True))


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return messages (of `plain_message`) as the chat template renders them, with tool calls as it expects them.

    A template that leaves out content that is text gets it as a list of parts; those of some vision models are so.
    """
    if any(message.get("tool_calls") for message in messages):
        content, is_text = _call_form(tokenizer, str(tokenizer.chat_template))
        messages = [_formed(message, content, is_text=is_text) for message in messages]
    if not _shows_text(tokenizer, str(tokenizer.chat_template)):
        messages = [_with_parts(message) for message in messages]
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


@lru_cache(maxsize=8)
def _shows_text(tokenizer: Any, _template: str) -> bool:
    """Return true unless the template renders a text only if it is in a list of parts."""
    forms = ("agl-probe", [{"type": "text", "text": "agl-probe"}])
    shown: list[bool] = []
    for content in forms:
        try:
            message = {"role": "user", "content": content}
            shown.append("agl-probe" in tokenizer.apply_chat_template([message], tokenize=False))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            shown.append(False)
    return shown != [False, True]


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _formed(message: Mapping[str, Any], content: str | None, *, is_text: bool) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    if is_text:
        functions = [one | {"arguments": json.dumps(one.get("arguments"), ensure_ascii=False)} for one in functions]
    formed = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return {**message, "content": message["content"] or content, "tool_calls": formed}


@lru_cache(maxsize=8)
def _call_form(tokenizer: Any, _template: str) -> tuple[str | None, bool]:
    """Return the form that the template expects of tool calls: the content of such a message, and the arguments' type.

    The second value is true if arguments are to be text. Templates that expect another form leave the call out, or
    write its arguments as Python would.
    """
    function = {"name": "agl_probe_tool", "arguments": {"where": "agl-probe"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "agl000000", "function": function}]}
    texts: dict[tuple[str | None, bool], str] = {}
    for content, is_text in _FORMS:
        messages = [{"role": "user", "content": "question"}, _formed(call, content, is_text=is_text)]
        try:
            texts[content, is_text] = tokenizer.apply_chat_template(messages, tokenize=False)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            continue
    for shown in ('"agl-probe"', "agl-probe"):
        for form, text in texts.items():
            if shown in text and "'agl-probe'" not in text:
                return form
    return _FORMS[0]


class TextCodec:
    """A tokenizer, and the tokens that end a response.

    Args:
        tokenizer: A Hugging Face tokenizer, which is copied.
        stop_ids: Ids that end a response.
        visible: Texts of special tokens that stay in decoded responses, such as the tags of tool calls.
    """

    def __init__(self, tokenizer: Any, *, stop_ids: Collection[int] = (), visible: Sequence[str] = ()) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        # Of all ways to tokenise, only its `encode_batch_fast` leaves the interpreter to other threads.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self._token_texts: dict[int, str] = {}
        self.stop_ids = frozenset(stop_ids)
        special = cast("list[int]", tokenizer.all_special_ids)
        self._hidden_ids = frozenset(i for i in special if not any(self.token_text(i) in text for text in visible))

    @property
    def chat_template(self) -> str:
        """The source of the chat template, or of all templates if there are several; `""` without a template."""
        template = self._tokenizer.chat_template
        return "\n".join(cast("dict[str, str]", template).values()) if isinstance(template, dict) else template or ""

    @property
    def longest_token(self) -> int:
        """Largest number of characters of one token."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def rendering_arguments(self) -> frozenset[str]:
        """Names that `chat_template_kwargs` may not set, because they are arguments of the rendering function."""
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset({"messages", *parameters}) - {"documents"}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`."""
        if self._fast is not None:
            return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD. Visible special tokens always stay."""
        kept = [i for i in ids if i not in self._hidden_ids] if skip_special_tokens else list(ids)
        return self._tokenizer.decode(kept, clean_up_tokenization_spaces=False)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; for a special token, too."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode([token_id])
        return self._token_texts[token_id]

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the conversation as the chat template renders it, up to where the assistant's answer begins."""
        return render_chat(self._tokenizer, messages, add_generation_prompt=True, **options)

    def generation_suffix(self) -> str:
        """Return the text that the chat template puts before an assistant's answer; `""` if it cannot be determined."""
        hello = [{"role": "user", "content": "hello"}]
        if not self._tokenizer.chat_template:
            return ""
        asked, open_ = (
            self._tokenizer.apply_chat_template(hello, tokenize=False, add_generation_prompt=is_open)
            for is_open in (False, True)
        )
        return open_.removeprefix(asked) if open_.startswith(asked) else ""


class TextStream:
    """The decoded text of a growing token sequence; it holds complete characters only."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._window, self._read = 0, 0
        self.text = ""

    def push(self, token_id: int) -> None:
        """Add the next token; `text` grows by the characters that the token completes."""
        self._ids.append(token_id)
        # Only the latest tokens are decoded again. The text of a token depends on the token before it (leading spaces),
        # so the window starts one completed piece earlier, and the text of that piece is removed.
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self.text += after[len(before) :]
            self._window, self._read = self._read, len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special_tokens=True)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return `text` up to its earliest stop string."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


def safe_length(text: str, markers: Sequence[str]) -> int:
    """Return how many characters of a growing text can be sent.

    Text from the first marker on is held back, and so is an end that later text may complete to a marker.
    """
    cut = len(cut_at_stop(text, markers))
    if cut < len(text):
        return cut
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return len(text) - size
    return len(text)


def stop_checker(codec: TextCodec, stops: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Return a `GenerationRequest.stop_check` that detects stop strings; None without stop strings."""
    if not stops:
        return None
    # A character takes at most four tokens (byte by byte). Four more tokens complete a first character that is cut.
    window = 4 * max(len(stop) for stop in stops) + 4

    def has_stopped(ids: Sequence[int]) -> bool:
        text = codec.decode(ids[-window:], skip_special_tokens=True)
        return any(stop in text for stop in stops)

    return has_stopped
