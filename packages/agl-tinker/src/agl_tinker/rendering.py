"""Turns conversations into tokens with a model's chat template, and answers into messages.

If a prompt's text begins with an earlier prompt and its answer, that prefix gets the tokens that were used and sampled
then, and only the rest is tokenised. So the calls of a conversation become one row if the template prints answers as
the model wrote them; otherwise a new row begins.
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
"""The most tokens of remembered prompts and answers; beyond it, the least recently used ones are forgotten."""


class ChatText:
    """A tokenizer with its chat template; must be used in one thread.

    Args:
        name: Directory or hub name of the tokenizer.
        parses_tools: Whether tool calls in the notation of Hermes and Qwen are recognised in answers.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or has no chat template.
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
        """Return the tokens of a conversation up to the start of the answer; raises ValueError with the reason."""
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
        """Return the tokens of a text; its longest remembered start keeps the recorded tokens."""
        known = max((turn for turn in self._turns if text.startswith(turn)), key=len, default="")
        if known:
            self._turns.move_to_end(known)
        rest = self._tokenizer(text[len(known) :], add_special_tokens=False, verbose=False)["input_ids"]
        return [*self._turns.get(known, ()), *rest]

    def remember(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember the tokens of a prompt and its answer for prompts that continue them."""
        ids = (*prompt, *answer)
        text = self._decode(ids)
        self._n_tokens += len(ids) - len(self._turns.pop(text, ()))
        self._turns[text] = ids
        while self._n_tokens > _MOST_TOKENS:
            _, oldest = self._turns.popitem(last=False)
            self._n_tokens -= len(oldest)

    def message(self, ids: Sequence[int], *, stops: Sequence[str], has_tools: bool) -> dict[str, Any]:
        """Return an answer as a message; if a tool call in it is malformed, the whole text becomes the content."""
        content = self.text(ids, stops=stops)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        calls = _calls(content) if has_tools and self._parses_tools else []
        if calls:
            message["content"] = content.partition(_OPEN)[0].removesuffix("\n") or None
            message["tool_calls"] = calls
        return message

    def text(self, ids: Sequence[int], *, stops: Sequence[str] = ()) -> str:
        """Return the text of an answer up to the first stop string, without tokens that frame messages."""
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
    """Return a message in the form that templates expect: text as one string, and tool arguments as objects."""
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
    """Return the tool calls in an answer; an empty list if any of them is malformed."""
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
