"""Reads dialogues in OpenAI's message format and turns them into tokens of which only the assistant's are trained.

One line is `{"messages": [...], "tools": [...]}`; `tools` may be absent. Preferences are pairs of dialogues that begin
alike, `{"prompt": [...], "chosen": [...], "rejected": [...]}` as `agl data export --format dpo` and TRL write them, or
single answers with a label, `{"prompt": [...], "completion": [...], "label": true}` as in TRL. Nobody sampled these
texts with token ids, so the ids come from the policy's own tokenizer. Messages are rendered with its chat template,
exactly as the policy server renders a request, so training sees what serving will.
The assistant's tokens are those of the text that its turn adds to the prompt, up to and including the end-of-turn
token. A template that renders earlier turns differently later (as reasoning models do) gives several rows.
Weights, losses and updates are left to `sft` and `preferences`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from agl.errors import DatasetError
from agl_algo_torch.learner.batch import RowSample, from_tokens
from agl_algo_torch.serving.templates import plain_message

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Message = dict[str, Any]

_LABELLED = '{"prompt": [...], "completion": [{"role": "assistant", "content": ...}], "label": true}'
_FORM = '{"prompt": [{"role": ..., "content": ...}, ...], "chosen": [...], "rejected": [...]}'

Side = Literal["chosen", "rejected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation and the tools that it was given; `where` is file and line, for error messages."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


def read_dialogues(path: Path) -> list[Dialogue]:
    """Read a JSON-lines file; blank lines are skipped. Raises DatasetError with file and line."""
    return [_dialogue(row, where) for where, row in read_objects(path, what="dialogues")]


def read_objects(path: Path, *, what: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a JSON-lines file with the places where they stand, an empty one for other values.

    Blank lines are skipped. Raises DatasetError for a file of `what` that is not there, is empty, or has a line that
    is not JSON.
    """
    if not path.is_file():
        raise DatasetError(
            f"The file of {what} {path} does not exist (looked from {Path.cwd()}). Correct `data` or create it."
        )
    lines = path.read_text(encoding="utf-8").split("\n")
    found = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise DatasetError(f"The file of {what} {path} is empty. Give one JSON object per line.")
    return found


def _parse(line: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: the line is not JSON ({error.msg}). Give one JSON object per line.") from error
    return where, cast("dict[str, Any]", row) if isinstance(row, dict) else {}


def _dialogue(row: dict[str, Any], where: str) -> Dialogue:
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(is_message(m) for m in cast("list[Any]", messages)):
        raise DatasetError(
            f'{where}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}. '
            "Give the messages as the OpenAI chat API takes them."
        )
    turns = cast("list[Message]", messages)
    if not any(m["role"] == "assistant" for m in turns):
        raise DatasetError(
            f"{where}: no message has the role assistant, so there is nothing to learn. Remove the line."
        )
    tools: list[Any] = row.get("tools") or []
    return Dialogue(where=where, messages=tuple(turns), tools=tuple(tools))


def is_message(value: Any) -> bool:
    """Return whether a value is an object with a role."""
    return isinstance(value, dict) and isinstance(cast("dict[str, Any]", value).get("role"), str)


def tokenize(dialogue: Dialogue, *, tokenizer: Any, max_tokens: int, start: int = 0) -> list[RowSample]:
    """Return the rows of a dialogue, one where the template only appends; messages before `start` are not trained.

    All rows carry `dialogue.where` as their rollout, so they share an update and one share of the gradient.
    Raises DatasetError for a row above `max_tokens`, or one that the template cannot render.
    """
    samples: list[RowSample] = []
    for text, spans in _rows(dialogue, tokenizer, start):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        if len(ids) > max_tokens:
            raise DatasetError(
                f"{dialogue.where}: the dialogue has {len(ids)} tokens, but the model's context is {max_tokens}. "
                "Shorten or remove it."
            )
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        # A token belongs to the assistant when its first character does; one token cannot be trained by halves.
        mask = [int(any(start <= a < stop for start, stop in spans)) for a, _ in offsets]
        samples.append(from_tokens(dialogue.where, ids, mask))
    return samples


def _rows(dialogue: Dialogue, tokenizer: Any, first: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield texts with the assistant's character spans, longest first; every assistant turn is in one of them."""
    text, spans = "", list[tuple[int, int]]()
    # From the last turn back: an earlier turn whose rendering the text begins with is trained there, at no extra
    # tokens. One that the template renders differently by then needs a row of its own.
    for index in reversed(range(first, len(dialogue.messages))):
        if dialogue.messages[index]["role"] != "assistant":
            continue
        rendered, start = _turn(dialogue, tokenizer, index)
        if not text.startswith(rendered):
            if text:
                yield text, spans
            text, spans = rendered, []
        spans.append((start, len(rendered)))
    yield text, spans


def _turn(dialogue: Dialogue, tokenizer: Any, index: int) -> tuple[str, int]:
    """Return the conversation up to the end of the assistant turn `index`, and the character where it begins."""
    messages = [plain_message(message) for message in dialogue.messages]
    prompt = _render(tokenizer, messages[:index], dialogue, is_prompt=True)
    whole = _render(tokenizer, messages[: index + 1], dialogue, is_prompt=False)
    if not whole.startswith(prompt):
        raise DatasetError(
            f"{dialogue.where}: the chat template renders message {index} so that it does not continue its prompt. "
            "Use a template whose generation prompt is a prefix of the answer."
        )
    # Some templates write a line break after the end-of-turn token; the model never has to write it.
    end = whole.rfind(tokenizer.eos_token, len(prompt)) if tokenizer.eos_token else -1
    return (whole if end < 0 else whole[: end + len(tokenizer.eos_token)]), len(prompt)


def _render(tokenizer: Any, messages: list[Message], dialogue: Dialogue, *, is_prompt: bool) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=list(dialogue.tools) or None, tokenize=False, add_generation_prompt=is_prompt
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenExample:
    """A chosen and a rejected dialogue, by these names, or only one of them; what counts begins at message `start`."""

    sides: Mapping[Side, Dialogue]
    start: int

    def where(self, side: Side) -> str:
        """Return the file and line of the chosen or the rejected dialogue, empty where it is missing."""
        return self.sides[side].where if side in self.sides else ""

    def rows(self, *, tokenizer: Any, max_tokens: int) -> Iterator[RowSample]:
        """Yield the rows of its dialogues, named by their `where`; raises DatasetError like `tokenize`."""
        for side in self.sides.values():
            yield from tokenize(side, tokenizer=tokenizer, max_tokens=max_tokens, start=self.start)


def read_pairs(path: Path) -> list[WrittenExample]:
    """Read a JSON-lines file; blank lines are skipped. Raises DatasetError with file and line."""
    return [_pair(row, where) for where, row in read_objects(path, what="pairs")]


def read_answers(path: Path) -> list[WrittenExample]:
    """Read a JSON-lines file of answers with labels, and of pairs, each a good and a bad answer.

    Blank lines are skipped. Raises DatasetError with file and line.
    """
    return [answer for where, row in read_objects(path, what="answers") for answer in _answers(row, where)]


def _pair(row: dict[str, Any], where: str) -> WrittenExample:
    prompt, chosen, rejected = (_messages(row.get(name), where) for name in ("prompt", "chosen", "rejected"))
    better, worse = (
        _continued(row, prompt, part, where=f"{where} {name}")
        for name, part in (("chosen", chosen), ("rejected", rejected))
    )
    return WrittenExample(sides={"chosen": better, "rejected": worse}, start=len(prompt))


def _answers(row: dict[str, Any], where: str) -> list[WrittenExample]:
    if "label" not in row and "completion" not in row:
        pair = _pair(row, where)
        return [WrittenExample(sides={name: side}, start=pair.start) for name, side in pair.sides.items()]
    label = row.get("label")
    if not isinstance(label, bool):
        raise DatasetError(f"{where}: label is {label!r}; expected true for a good answer or false: {_LABELLED}.")
    prompt, completion = _messages(row.get("prompt"), where), _messages(row.get("completion"), where)
    dialogue = _continued(row, prompt, completion, where=where)
    return [WrittenExample(sides={"chosen" if label else "rejected": dialogue}, start=len(prompt))]


def _continued(row: dict[str, Any], prompt: list[Message], answer: list[Message], *, where: str) -> Dialogue:
    if not any(message["role"] == "assistant" for message in answer):
        raise DatasetError(
            f"{where}: no message has the role assistant, so there is nothing to learn. Remove the line."
        )
    return Dialogue(where=where, messages=(*prompt, *answer), tools=tuple(row.get("tools") or ()))


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value or not all(map(is_message, cast("list[Any]", value))):
        raise DatasetError(
            f"{where}: expected {_FORM}, or for kto {_LABELLED}. agl data export --format dpo writes pairs."
        )
    return cast("list[Message]", value)
