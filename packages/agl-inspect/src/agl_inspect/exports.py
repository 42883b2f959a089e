"""The contract of the formats that plugins add to ``agl data export``.

A plugin registers a format as a command below ``export``: ``CommandEntry(name="atif", parent="export", ...)``. The
entry's factory is called with one :class:`ExportSetup` as ``setup`` and builds an :class:`ExportWriter`. The command
chooses the rollouts, opens the file, and gives the file its final name once everything is written.

The format ``merged`` is an exception: its factory is a function that gets trained weights and the directory to write.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeGuard

import msgspec
from msgspec.structs import replace

from agl.contracts import Recording
from agl.schemas import (
    Blob,
    Episode,
    Json,
    ModelCall,
    Reward,
    pack_floats,
    pack_ids,
    to_builtins,
    unpack_floats,
    unpack_ids,
)

_NAMED = 20
"""The most rollout ids that are listed for each kind of loss."""


class Exported(NamedTuple):
    """A rollout to write.

    Attributes:
        recording: The rollout with all its attempts and all their spans.
        episode: The rollout's episode; calls of agents that ``--agents`` does not choose have the reject reason
            ``not_selected``.
        blobs: The pictures and other inputs of the calls, by digest; those that the store no longer has are missing.
            Empty for a writer that does not read them.
    """

    recording: Recording
    episode: Episode
    blobs: Mapping[str, Blob] = MappingProxyType({})


class Losses:
    """Counts contents that a format cannot hold, and remembers the first rollouts with each kind of loss."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._rollouts: dict[str, list[str]] = {}

    def add(self, what: str, rollout_id: str, count: int = 1) -> None:
        """Count a loss; ``what`` says what was lost and how, such as ``"calls that failed: left out"``."""
        if count <= 0:
            return
        self._counts[what] += count
        known = self._rollouts.setdefault(what, [])
        if len(known) < _NAMED and rollout_id not in known:
            known.append(rollout_id)

    def listed(self) -> list[tuple[str, int, list[str]]]:
        """Return ``(loss, count, first rollouts' ids)`` for each kind of loss, the most frequent first."""
        return [(what, count, self._rollouts[what]) for what, count in self._counts.most_common()]


class ExportSetup(NamedTuple):
    """The arguments with which a writer is built.

    Attributes:
        file: The open file, which the command closes.
        path: The final name of the file, whose suffix may choose a variant; ``None`` for standard output. It ends in
            ``.parquet`` only if the summary of the format's entry says ``.parquet``.
        losses: The counter to which the writer adds contents that the format cannot hold.
    """

    file: BinaryIO
    path: Path | None
    losses: Losses


class ExportWriter(Protocol):
    """Writes rollouts to a file, one after the other, with few of them in memory.

    Attributes:
        reads_blobs: Whether ``write`` uses the blobs, which may be many megabytes.
    """

    reads_blobs: bool

    def write(self, item: Exported) -> int:
        """Write a rollout, or count in ``losses`` why it is left out; return the number of records written."""
        ...

    def close(self) -> None:
        """Complete the file; called once, after the last rollout, but not after an error.

        Raises :class:`agl.errors.ConfigError` if the format could hold none of the rollouts, for example because they
        have no token ids.
        """
        ...


def call_record(call: ModelCall) -> dict[str, Json]:
    """Return a call's fields as JSON without its request and response, which each format stores in its own way.

    Token ids and log-probabilities become lists; log-probabilities are left out if any of them is not finite.
    """
    plain = replace(call, request=None, response=None, prompt_ids=b"", response_ids=b"", logprobs=b"")
    logprobs = unpack_floats(call.logprobs)
    lists: dict[str, list[Any]] = {
        "prompt_token_ids": unpack_ids(call.prompt_ids),
        "completion_token_ids": unpack_ids(call.response_ids),
        "completion_logprobs": logprobs if all(map(math.isfinite, logprobs)) else [],
    }
    return {**to_builtins(plain), **{name: values for name, values in lists.items() if values}}


def call_of_record(record: Json, *, request: Json, response: Json) -> ModelCall:
    """Convert a record of :func:`call_record` back to a call; raises :class:`ValueError` if it is not such a record."""
    try:
        call = msgspec.convert(record, ModelCall)
        ids, answer, logprobs = (record.get(name, []) for name in _LISTS)
        packed = {"prompt_ids": pack_ids(ids), "response_ids": pack_ids(answer), "logprobs": pack_floats(logprobs)}
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"it is not a record of a model call: {error}") from error
    return replace(call, request=request, response=response, **packed)


def reward_of_record(record: Json) -> Reward:
    """Convert a reward that :func:`agl.schemas.to_builtins` encoded back to a reward without a span id.

    Raises :class:`ValueError` if the record is not a reward.
    """
    try:
        return replace(msgspec.convert(record, Reward), span_id=None)
    except msgspec.ValidationError as error:
        raise ValueError(f"it is not a record of a reward: {error}") from error


_LISTS = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")


def chat_tools(call: ModelCall) -> list[Any]:
    """Return a request's tools in the form of the dialect ``chat``; tools that only a server can run are left out."""
    found = call.request.get("tools") if _is_object(call.request) else None
    given = [tool for tool in found if _is_object(tool)] if isinstance(found, list) else []  # pyright: ignore[reportUnknownVariableType]  # any JSON
    if call.dialect == "chat":
        return given
    return [_function(tool) for tool in given if "name" in tool]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tool["name"], "description": tool.get("description", "")}
    fields["parameters"] = tool.get("parameters") or tool.get("input_schema") or {"type": "object"}
    return {"type": "function", "function": fields}


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
