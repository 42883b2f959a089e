"""Preference pairs as text: reads them, and turns them into the rows that `dpo` trains.

One line is `{"prompt": [...], "chosen": [...], "rejected": [...], "tools": [...]}` in OpenAI's message format, as
`agl export --format dpo` and TRL write it; `tools` may be absent. Nobody sampled these answers with token ids, so the
ids come from the policy's own tokenizer and chat template, as those of `sft` do. Only what the assistant says behind
the prompt counts. Losses and updates are left to `preference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError, DatasetError
from agl_algo_torch.dialogues import Dialogue, is_message, read_objects, tokenize

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agl_algo_torch.batch import RowSample

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


def read_pairs(path: Path) -> list[WrittenPair]:
    """Read a JSON-lines file; blank lines are skipped. Raises DatasetError with file and line."""
    return [_pair(row, where) for where, row in read_objects(path, what="pairs")]


def check_ignored(data: str, given: dict[str, bool]) -> None:
    """Refuse settings that `data` would make idle; `given` says for each name if it is set."""
    idle = [name for name, is_set in given.items() if is_set]
    if data and idle:
        raise ConfigError(
            f"dpo reads its pairs from data = {data!r}, so {', '.join(idle)} would be ignored; remove "
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


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(map(is_message, cast("list[Any]", value))):
        raise DatasetError(f"{where}: expected {_FORM}. Write the file with agl export --format dpo.")
    return cast("list[dict[str, Any]]", value)
