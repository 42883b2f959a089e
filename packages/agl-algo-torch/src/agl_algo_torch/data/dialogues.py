"""Reads dialogues in OpenAI's message format and tokenises them; only the assistant's tokens are trained.

One line is `{"messages": [...], "tools": [...]}`; `tools` may be absent. Preferences are pairs of dialogues with a
common prompt, `{"prompt": [...], "chosen": [...], "rejected": [...]}` as `agl data export --format dpo` and TRL write
them, or single answers with a label, `{"prompt": [...], "completion": [...], "label": true}` as in TRL. These texts
have no recorded token ids, so the ids come from the policy's own tokenizer. Messages are rendered with the policy's
chat template, exactly as the policy server renders a request, so training and serving see the same text.
The tokens of an assistant turn are those that the turn adds to the prompt, up to and including the stop token, also
where a template leaves it to the next message (as GLM's, whose turns end with the role of the next one).
A message may have pictures, as in the chat API: `{"type": "image_url", "image_url": {"url": ...}}` with a data URL, or
with the path of a file relative to the file of dialogues.
A dialogue gives several rows if the template renders an earlier turn differently later (as reasoning models do).
Weights, losses and updates are left to `sft` and `preferences`.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from jinja2 import TemplateError

from agl.errors import DatasetError
from agl_algo_torch.learner.batch import RowSample, from_tokens
from agl_algo_torch.learner.pictures import expanded
from agl_algo_torch.serving.codec import render_chat
from agl_algo_torch.serving.pictures import pictures_of
from agl_algo_torch.serving.templates import plain_message
from agl_algo_torch.serving.toolcalls import read_format
from agl_algo_torch.serving.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from agl.contracts import Modality
    from agl_algo_torch.learner.pictures import RowPictures

Message = dict[str, Any]

_LABELLED = '{"prompt": [...], "completion": [{"role": "assistant", "content": ...}], "label": true}'
_FORM = '{"prompt": [{"role": ..., "content": ...}, ...], "chosen": [...], "rejected": [...]}'

Side = Literal["chosen", "rejected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation and its tools; `where` is the source file and line, for error messages."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the source file, where the paths of pictures begin."""
        return Path(self.where.rpartition(":")[0]).parent


def read_dialogues(path: Path) -> list[Dialogue]:
    """Read a JSON-lines file of dialogues; blank lines are skipped. Raises DatasetError with file and line."""
    return [_dialogue(row, where) for where, row in read_objects(path, what="dialogues")]


def read_objects(path: Path, *, what: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a JSON-lines file, each with its file and line; any other JSON value gives an empty object.

    Blank lines are skipped. Raises DatasetError if the file is absent or empty, or if a line is not JSON. `what` says
    in error messages what the file should contain.
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
    """Return true if a value is a JSON object whose `role` is text."""
    return isinstance(value, dict) and isinstance(cast("dict[str, Any]", value).get("role"), str)


def check_dialogues(
    dialogues: Sequence[Dialogue],
    *,
    tokenizer: Any,
    max_tokens: int,
    stop_ids: Collection[int],
    modality: Modality | None = None,
) -> list[str]:
    """Tokenise all dialogues, and return sentences about turns whose tokens are not what the file says.

    Raises DatasetError as `tokenize` does.
    """
    stops = _stop_texts(tokenizer, stop_ids)
    thinking = read_format(tokenizer, stop_texts=stops).thinking
    found: dict[str, list[str]] = {}
    for dialogue in dialogues:
        tokenize(dialogue, tokenizer=tokenizer, max_tokens=max_tokens, stop_ids=stop_ids, modality=modality)
        for index, message in enumerate(dialogue.messages):
            if message["role"] == "assistant":
                text, start = _turn(dialogue, tokenizer, index, stops)
                for problem in _losses(message, text[start:], stops, thinking):
                    found.setdefault(problem, []).append(dialogue.where)
    return [f"assistant turns {text}: {len(places)}, first in {places[0]}" for text, places in found.items()]


def _losses(message: Message, rendered: str, stops: Sequence[str], thinking: tuple[str, str] | None) -> Iterator[str]:
    """Yield what the chat template loses or doubles of an assistant message."""
    plain = plain_message(message)
    content, thought = plain["content"], plain.get("reasoning_content") or ""
    opening = thinking[0] if thinking and content.startswith(thinking[0]) else ""
    if not rendered.endswith(tuple(stops)):
        yield "do not end in a stop token, so the model does not learn to stop"
    if thinking and opening and rendered.count(thinking[1]) > content.count(thinking[1]):
        yield "have their reasoning in the content, after empty reasoning; move it to `reasoning_content`"
    shown = "".join(rendered.split())
    # The prompt itself may end with the tag that opens the reasoning.
    for name, words in (("content", content.removeprefix(opening)), ("reasoning", thought)):
        if "".join(words.split()) not in shown:
            yield f"have {name} that the chat template changes or leaves out"
    calls = Counter(call["function"]["name"] for call in plain.get("tool_calls") or ())
    if any(rendered.count(name) < count for name, count in calls.items()):
        yield "have tool calls that the chat template leaves out"


def tokenize(
    dialogue: Dialogue,
    *,
    tokenizer: Any,
    max_tokens: int,
    start: int = 0,
    stop_ids: Collection[int] = (),
    modality: Modality | None = None,
) -> list[RowSample]:
    """Return the rows of a dialogue; a template that only appends messages gives one row.

    Messages before `start` are not trained. Besides the tokenizer's end of sequence, `stop_ids` end an assistant turn.
    All rows have `dialogue.where` as their rollout, so they are all in one update and share one part of the gradient.
    `modality` reads the pictures of messages, if the model reads any.
    Raises DatasetError for a row above `max_tokens`, messages that the template refuses, a picture that cannot be read,
    or a turn whose rendering does not continue its prompt.
    """
    samples: list[RowSample] = []
    for text, spans, messages in _rows(dialogue, tokenizer, start, _stop_texts(tokenizer, stop_ids)):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        # A token belongs to the assistant if its first character does, because half a token cannot be trained.
        mask = [int(any(start <= a < stop for start, stop in spans)) for a, _ in offsets]
        ids, mask, pictures = _with_pictures(ids, mask, dialogue, messages, modality)
        if len(ids) > max_tokens:
            raise DatasetError(
                f"{dialogue.where}: the dialogue has {len(ids)} tokens, but the model's context is {max_tokens}. "
                "Shorten or remove it."
            )
        samples.append(from_tokens(dialogue.where, ids, mask, pictures=pictures))
    return samples


def _with_pictures(
    ids: list[int], mask: list[int], dialogue: Dialogue, messages: int, modality: Modality | None
) -> tuple[list[int], list[int], RowPictures | None]:
    """Return ids, mask and pictures of a row that has the first `messages` messages of a dialogue."""
    try:
        blobs = pictures_of([_inlined(message, dialogue.folder) for message in dialogue.messages[:messages]])
        if modality is None and blobs:
            raise ValueError("the model reads no pictures, or agl-vision is not installed")
        return (ids, mask, None) if modality is None else expanded(ids, mask, blobs, modality)
    except (OSError, ValueError, WireError) as error:
        raise DatasetError(
            f"{dialogue.where}: the pictures of the dialogue cannot be trained: {error}. Correct or remove the line."
        ) from error


def _inlined(message: Message, folder: Path) -> Message:
    """Return the message with the pictures in files as data URLs."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("list[dict[str, Any]]", content)
    return {**message, "content": [_inlined_part(part, folder) for part in parts]}


def _inlined_part(part: dict[str, Any], folder: Path) -> dict[str, Any]:
    source: Any = part.get("image_url")
    url = str(cast("dict[str, Any]", source)["url"] if isinstance(source, dict) else source)
    if part.get("type") != "image_url" or "://" in url or url.startswith("data:"):
        return part
    kind = mimetypes.guess_type(url)[0] or "application/octet-stream"
    data = base64.b64encode((folder / url).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _rows(
    dialogue: Dialogue, tokenizer: Any, first: int, stops: Sequence[str]
) -> Iterator[tuple[str, list[tuple[int, int]], int]]:
    """Yield texts, longest first, with the character spans to train and the number of messages in the text.

    Each assistant turn is a span of one text.
    """
    text, spans, messages = "", list[tuple[int, int]](), 0
    # From the last turn back: if the text begins with the rendering of an earlier turn, that turn is trained in the
    # same row. A turn that the template rendered differently then needs a row of its own.
    for index in reversed(range(first, len(dialogue.messages))):
        if dialogue.messages[index]["role"] != "assistant":
            continue
        rendered, start = _turn(dialogue, tokenizer, index, stops)
        if not text.startswith(rendered):
            if text:
                yield text, spans, messages
            text, spans, messages = rendered, [], index + 1
        spans.append((start, len(rendered)))
    yield text, spans, messages


def _stop_texts(tokenizer: Any, stop_ids: Collection[int]) -> tuple[str, ...]:
    ids = {*stop_ids, tokenizer.eos_token_id} - {None}
    return tuple(tokenizer.convert_ids_to_tokens(sorted(ids)))


def _turn(dialogue: Dialogue, tokenizer: Any, index: int, stops: Sequence[str]) -> tuple[str, int]:
    """Return the rendered text up to the end of the assistant turn `index`, and the character where the turn begins."""
    messages = [plain_message(message) for message in dialogue.messages]
    prompt = _render(tokenizer, messages[:index], dialogue, is_prompt=True)
    whole = _render(tokenizer, messages[: index + 1], dialogue, is_prompt=False)
    if not whole.startswith(prompt):
        raise DatasetError(
            f"{dialogue.where}: the chat template renders message {index} so that it does not continue its prompt. "
            "Use a template whose generation prompt is a prefix of the answer."
        )
    # Some templates write a line break after the stop token; the model never has to write it.
    ends = [at + len(stop) for stop in stops if (at := whole.rfind(stop, len(prompt))) >= 0]
    if ends:
        return whole[: max(ends)], len(prompt)
    following = {"role": "tool" if messages[index].get("tool_calls") else "user", "content": "x"}
    longer = _render(tokenizer, [*messages[: index + 1], following], dialogue, is_prompt=False)
    return whole + next((stop for stop in stops if longer.startswith(whole + stop)), ""), len(prompt)


def _render(tokenizer: Any, messages: list[Message], dialogue: Dialogue, *, is_prompt: bool) -> str:
    try:
        return render_chat(tokenizer, messages, tools=list(dialogue.tools) or None, add_generation_prompt=is_prompt)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise DatasetError(
            f"{dialogue.where}: the model's chat template refuses the messages: {error}. Change their roles, order or "
            "fields, or remove the line."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenExample:
    """A chosen and a rejected dialogue, or only one of them; messages before `start` do not train."""

    sides: Mapping[Side, Dialogue]
    start: int

    def where(self, side: Side) -> str:
        """Return the source file and line of the chosen or rejected dialogue; `""` if the example lacks it."""
        return self.sides[side].where if side in self.sides else ""

    def rows(
        self, *, tokenizer: Any, max_tokens: int, stop_ids: Collection[int], modality: Modality | None = None
    ) -> Iterator[RowSample]:
        """Yield the rows of the dialogues, with each dialogue's `where` as the rollout; raises as `tokenize` does."""
        for side in self.sides.values():
            yield from tokenize(
                side,
                tokenizer=tokenizer,
                max_tokens=max_tokens,
                start=self.start,
                stop_ids=stop_ids,
                modality=modality,
            )


def read_pairs(path: Path) -> list[WrittenExample]:
    """Read a JSON-lines file of preference pairs; blank lines are skipped. Raises DatasetError with file and line."""
    return [_pair(row, where) for where, row in read_objects(path, what="pairs")]


def read_answers(path: Path) -> list[WrittenExample]:
    """Read a JSON-lines file of labelled answers; a line with a preference pair gives a good and a bad answer.

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
