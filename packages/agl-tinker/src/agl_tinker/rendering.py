"""Turns conversations into tokens with a model's chat template, and answers into messages.

A prompt whose text begins with that of an earlier prompt and its answer begins with their tokens, as they were sampled;
only what follows is tokenised. So the calls of one conversation are one row where the template prints an answer as the
model wrote it, and begin another row where it does not.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError

from agl.errors import ConfigError

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MOST_TOKENS = 2_000_000
"""Tokens of prompts and answers that are remembered; the turns that were asked for longest ago are forgotten."""


class ChatText:
    """A tokenizer with its template; used in one thread.

    Args:
        name: Directory or hub name of the tokenizer.
        parses_tools: Whether answers are read for tool calls in the notation of Hermes and Qwen.

    Raises:
        ConfigError: There is no such tokenizer, or it has no chat template.
    """

    def __init__(self, name: str, *, parses_tools: bool) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the tokenizer {name!r} cannot be loaded ({error}); set tokenizer to a folder that has it, or to its "
                "name on the hub"
            ) from error
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer {name!r} has no chat template, so messages cannot be turned into tokens; set tokenizer "
                "to that of an instruction-tuned model"
            )
        self._parses_tools = parses_tools
        own = self._tokenizer.eos_token_id
        self._end = frozenset(() if own is None else (int(own),))
        special: list[int] = self._tokenizer.all_special_ids
        self._hidden = frozenset(token for token in special if self._decode([token]) not in (_OPEN, _CLOSE))
        self._turns: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._n_tokens = 0

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins; raises ValueError with the reason."""
        try:
            text = self._tokenizer.apply_chat_template(
                [_readable(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ValueError(f"The model's chat template refuses these messages: {error}.") from error
        return self.encode(str(text))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, those of the longest remembered beginning as they were sampled."""
        known = max((turn for turn in self._turns if text.startswith(turn)), key=len, default="")
        if known:
            self._turns.move_to_end(known)
        rest = self._tokenizer(text[len(known) :], add_special_tokens=False, verbose=False)["input_ids"]
        return [*self._turns.get(known, ()), *rest]

    def remember(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep the tokens of a prompt and its answer for the prompts that continue them."""
        ids = (*prompt, *answer)
        text = self._decode(ids)
        self._n_tokens += len(ids) - len(self._turns.pop(text, ()))
        self._turns[text] = ids
        while self._n_tokens > _MOST_TOKENS:
            _, oldest = self._turns.popitem(last=False)
            self._n_tokens -= len(oldest)

    def message(self, ids: Sequence[int], *, stops: Sequence[str], has_tools: bool) -> dict[str, Any]:
        """Return the message of an answer; text with a malformed call stays content as a whole."""
        content = self.text(ids, stops=stops)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        calls = _calls(content) if has_tools and self._parses_tools else []
        if calls:
            message["content"] = content.partition(_OPEN)[0].removesuffix("\n") or None
            message["tool_calls"] = calls
        return message

    def text(self, ids: Sequence[int], *, stops: Sequence[str] = ()) -> str:
        """Return the text of an answer without the tokens that frame messages, up to the first stop string."""
        shown = ids[:-1] if ids and ids[-1] in self._end else ids
        text = self._decode([token for token in shown if token not in self._hidden])
        places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        return text[: min(places)] if places else text

    def token(self, token: int) -> str:
        """Return the text of one token."""
        return self._decode([token])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def _readable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it: text in one piece, and the arguments of calls as objects."""
    found = {key: value for key, value in message.items() if value is not None}
    content: Any = found.get("content", "")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        if not all(isinstance(part, dict) and cast("Any", part).get("type") == "text" for part in parts):
            raise ValueError("only text can be sent to this policy, and a message holds something else.")
        content = "".join(str(part.get("text", "")) for part in parts)
    found["content"] = content
    calls: list[dict[str, Any]] = []
    for call in found.pop("tool_calls", None) or ():
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return found | ({"tool_calls": calls} if calls else {})


def _calls(text: str) -> list[dict[str, Any]]:
    """Return the tool calls of an answer, none if one of them is malformed."""
    found: list[dict[str, Any]] = []
    for part in text.split(_OPEN)[1:]:
        body, closed, _ = part.partition(_CLOSE)
        try:
            value: Any = json.loads(body) if closed else None
        except ValueError:
            return []
        if not isinstance(value, dict):
            return []
        call = cast("dict[str, Any]", value)
        arguments = call.get("arguments", {})
        if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
            return []
        function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        found.append({"id": f"call-{secrets.token_hex(12)}", "type": "function", "function": function})
    return found
