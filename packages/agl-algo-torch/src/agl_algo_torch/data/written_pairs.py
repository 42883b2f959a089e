"""Preference pairs and labelled answers as text: reads them, and turns them into the rows that train.

One line is `{"prompt": [...], "chosen": [...], "rejected": [...], "tools": [...]}` in OpenAI's message format, as
`agl data export --format dpo` and TRL write it; `tools` may be absent. `kto` also takes single answers with a label,
`{"prompt": [...], "completion": [...], "label": true}` as in TRL, and pairs as one good and one bad answer. Nobody
sampled these answers with token ids, so the ids come from the policy's own tokenizer and chat template, as those of
`sft` do. Only what the assistant says behind the prompt counts. Losses and updates are left to `preferences`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError, DatasetError
from agl_algo_torch.data.dialogues import Dialogue, is_message, read_objects, tokenize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from agl_algo_torch.learner.batch import RowSample

_LABELLED = '{"prompt": [...], "completion": [{"role": "assistant", "content": ...}], "label": true}'
_FORM = '{"prompt": [{"role": ..., "content": ...}, ...], "chosen": [...], "rejected": [...]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPair:
    """Two dialogues that begin with the same messages, of which `start` is the number."""

    chosen: Dialogue
    rejected: Dialogue
    start: int

    def rows(self, *, tokenizer: Any, max_tokens: int) -> Iterator[RowSample]:
        """Yield the rows of both, named by the `where` of their dialogue; raises DatasetError like `tokenize`."""
        for side in (self.chosen, self.rejected):
            yield from tokenize(side, tokenizer=tokenizer, max_tokens=max_tokens, start=self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """A dialogue that is good or bad from message number `start` on."""

    dialogue: Dialogue
    is_good: bool
    start: int

    def rows(self, *, tokenizer: Any, max_tokens: int) -> Iterator[RowSample]:
        """Yield its rows, named by the `where` of the dialogue; raises DatasetError like `tokenize`."""
        yield from tokenize(self.dialogue, tokenizer=tokenizer, max_tokens=max_tokens, start=self.start)


def read_pairs(path: Path) -> list[WrittenPair]:
    """Read a JSON-lines file; blank lines are skipped. Raises DatasetError with file and line."""
    return [_pair(row, where) for where, row in read_objects(path, what="pairs")]


def read_answers(path: Path) -> list[WrittenAnswer]:
    """Read a JSON-lines file of answers with labels, and of pairs, each a good and a bad answer.

    Blank lines are skipped. Raises DatasetError with file and line.
    """
    return [answer for where, row in read_objects(path, what="answers") for answer in _answers(row, where)]


def check_source(data: str, sources: Sequence[str], *, algorithm: str) -> None:
    """Refuse a source beside `data`."""
    if sources:
        raise ConfigError(
            f"{algorithm} reads what it learns from in data = {data!r}, so the source {list(sources)} would be "
            "ignored; remove one of them."
        )


def reading_notice(count: int, data: str) -> str:
    """Return the sentence that says how much was read, and where its token ids come from."""
    return (
        f"{count} examples of text in {data}; their token ids come from the policy's tokenizer and chat template, as "
        "nobody recorded those that were sampled"
    )


def check_ignored(data: str, given: dict[str, bool], *, algorithm: str) -> None:
    """Refuse settings that `data` would make idle; `given` says for each name if it is set."""
    idle = [name for name, is_set in given.items() if is_set]
    if data and idle:
        raise ConfigError(
            f"{algorithm} reads what it learns from in data = {data!r}, so {', '.join(idle)} would be ignored; remove "
            f"{'it' if len(idle) == 1 else 'them'}, or remove data."
        )


def _pair(row: dict[str, Any], where: str) -> WrittenPair:
    parts = [_messages(row.get(name), where) for name in ("prompt", "chosen", "rejected")]
    prompt, chosen, rejected = parts
    for name, part in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in part):
            raise DatasetError(
                f"{where}: no message of {name} has the role assistant, so nothing can be compared. Remove the line."
            )
    tools = tuple(row.get("tools") or ())
    better, worse = (
        Dialogue(where=f"{where} {name}", messages=(*prompt, *part), tools=tools)
        for name, part in (("chosen", chosen), ("rejected", rejected))
    )
    return WrittenPair(chosen=better, rejected=worse, start=len(prompt))


def _answers(row: dict[str, Any], where: str) -> Iterator[WrittenAnswer]:
    if "label" not in row and "completion" not in row:
        pair = _pair(row, where)
        yield WrittenAnswer(dialogue=pair.chosen, is_good=True, start=pair.start)
        yield WrittenAnswer(dialogue=pair.rejected, is_good=False, start=pair.start)
        return
    label = row.get("label")
    if not isinstance(label, bool):
        raise DatasetError(f"{where}: label is {label!r}; expected true for a good answer or false: {_LABELLED}.")
    prompt, completion = _messages(row.get("prompt"), where), _messages(row.get("completion"), where)
    if not any(message["role"] == "assistant" for message in completion):
        raise DatasetError(f"{where}: no message of completion has the role assistant. Remove the line.")
    dialogue = Dialogue(where=where, messages=(*prompt, *completion), tools=tuple(row.get("tools") or ()))
    yield WrittenAnswer(dialogue=dialogue, is_good=label, start=len(prompt))


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(map(is_message, cast("list[Any]", value))):
        raise DatasetError(
            f"{where}: expected {_FORM}, or for kto {_LABELLED}. agl data export --format dpo writes pairs."
        )
    return cast("list[dict[str, Any]]", value)
