"""Reads traces from Langfuse's pages or API, rows of Langfuse's exports, and batches of events of its SDK 2.

A trace contains its observations and scores; exported rows and events name the trace that they belong to. Scores become
late rewards. Newer SDKs of Langfuse send OTLP, which :mod:`agl_data.importing.readers.otlp` reads.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from agl.errors import DatasetError
from agl.schemas import Json, RewardSource, SpanStatus
from agl_data.importing.readers.payloads import call_of, chat_usage, parsed
from agl_data.importing.runs import Run, own_call, own_reward
from agl_data.importing.source import read_lines
from agl_data.importing.traces import (
    KINDS,
    Kind,
    Part,
    Scored,
    agent_attributes,
    judged,
    marked,
    runs_of,
    tool_attributes,
)
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in, json_text, ns_of, number_of, whole_ns

_NO_NUMBER = "scores that are not numbers: their text is kept as feedback, without a value"
_NO_TRACE = "scores of sessions or of data sets, which are about no trace: left out"
_SOURCES: dict[str, RewardSource] = {"ANNOTATION": "human", "EVAL": "evaluator", "API": "evaluator"}
_EVENT = re.compile(r"(trace|span|generation|event|score|observation|agent|tool|chain)-(create|update)|sdk-log")
_TIMES = ("startTime", "timestamp")
_KINDS: dict[str, Kind] = {kind: kind for kind in KINDS}
_STATUS: dict[str, SpanStatus] = {"ok": "ok", "error": "error"}


def fits(record: Json) -> bool:
    """Return whether a record is a trace, an observation, a score, or a batch of events."""
    fields = _camel(record)
    if isinstance(fields.get("observations"), list):
        return True
    if isinstance(fields.get("batch"), list):
        return all(_EVENT.fullmatch(as_text(each.get("type"))) for each in dicts_in(fields["batch"]))
    return "id" in fields and (
        _is_observation(fields)
        or ("name" in fields and "value" in fields and bool({"traceId", "sessionId", "datasetRunId"} & fields.keys()))
    )


def read(path: Path) -> Iterator[Run]:
    """Read the traces of a file; raises :class:`DatasetError` for a record that does not come from Langfuse."""
    return runs_of(path, _parts(path))


def _parts(path: Path) -> Iterator[tuple[str, Part]]:
    with closing(_Events()) as events:
        for line in read_lines(path):
            if not fits(line.value):
                raise DatasetError(
                    f"{line.place} is not a trace, observation, score or batch of events of Langfuse; nothing was "
                    "imported: export traces with their observations as JSON or JSON lines"
                )
            record = _camel(line.value)
            if isinstance(record.get("batch"), list):
                events.take(record)
            else:
                yield from marked(line, _record(line.place, record))
        for record in events.records():
            yield from _record(str(path), record)


class _Events:
    """Merges events by trace, observation or score in a temporary database; later events complete earlier ones."""

    def __init__(self) -> None:
        self._gathered = sqlite3.connect("")  # a temporary file, which SQLite deletes when the connection closes
        self._gathered.execute("CREATE TABLE events (key TEXT PRIMARY KEY, data BLOB)")

    def close(self) -> None:
        """Delete the temporary database."""
        self._gathered.close()

    def take(self, batch: dict[str, Any]) -> None:
        """Add the events of a batch."""
        for event in dicts_in(batch.get("batch")):
            kind, _, _ = as_text(event.get("type")).partition("-")
            body = _camel(event.get("body"))
            if kind in ("sdk", ""):
                continue
            key = f"{kind} {body.get('id')}"
            row = self._gathered.execute("SELECT data FROM events WHERE key = ?", (key,)).fetchone()
            known = as_dict(msgspec.msgpack.decode(row[0])) if row else _blank(kind, body)
            known |= {name: value for name, value in body.items() if value is not None}
            data = msgspec.msgpack.encode(known)
            self._gathered.execute("INSERT OR REPLACE INTO events VALUES (?, ?)", (key, data))

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the merged traces, observations and scores."""
        for (data,) in self._gathered.execute("SELECT data FROM events"):
            yield as_dict(msgspec.msgpack.decode(data))


def _blank(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return default fields for a trace, a score or an observation, which exported records have and events lack."""
    if kind == "trace":
        return {"observations": []}
    return {} if kind == "score" else {"type": kind.upper(), "parentObservationId": body.get("traceId")}


def _record(place: str, record: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    if isinstance(record.get("observations"), list):
        yield from _trace(place, {**_camel(record.get("trace")), **record})
    elif _is_observation(record):
        trace, part = _observation(place, record, as_text(record.get("traceId")))
        if not part.parent and record.get("traceName"):
            part.stands_for = as_text(record["traceName"])
        yield trace, part
    else:
        yield _score(place, record, as_text(record.get("traceId")))


def _trace(place: str, record: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    """Yield a trace as a span, then the observations below that span, then the scores.

    The trace's span counts as an agent only if no observation is one.
    """
    own = as_text(record.get("id")) or as_text(record.get("traceId"))
    if not own:
        raise DatasetError(f"{place} is a trace without an id, and nothing was imported; export it once more")
    name = as_text(record.get("name"))
    fields = {key: value for key, value in record.items() if key not in ("observations", "scores", "trace")}
    start_ns = ns_of(record.get("timestamp"))
    is_own = bool(_own(record))
    stands_for = "" if is_own else name
    part = Part(id=own, name=name, stands_for=stands_for, start_ns=start_ns, end_ns=start_ns, fields=fields)
    part.is_left_out = is_own
    yield own, part
    for observation in as_list(record.get("observations")):
        if not isinstance(observation, dict):
            raise DatasetError(
                f"{place} names its observations and does not hold them; nothing was imported: export the trace "
                "with them, such as with its button Download JSON, or import the rows of observations"
            )
        found = _camel(observation)
        _, part = _observation(place, found, own)
        part.parent = part.parent or own
        yield own, part
    for score in dicts_in(record.get("scores")):
        yield _score(place, _camel(score), own)


def _observation(place: str, record: dict[str, Any], trace: str) -> tuple[str, Part]:
    own, name, kind = as_text(record.get("id")), as_text(record.get("name")), as_text(record.get("type")).upper()
    if not own or not trace:
        raise DatasetError(
            f"{place} is an observation without its id or that of its trace, and nothing was imported; export it with "
            "both"
        )
    asked, answered = parsed(record.get("input")), parsed(record.get("output"))
    is_error = record.get("level") == "ERROR"
    start_ns = next((at for field in _TIMES if (at := ns_of(record.get(field)))), 0)
    part = Part(
        id=own,
        parent=as_text(record.get("parentObservationId")),
        name=name,
        start_ns=start_ns,
        end_ns=ns_of(record.get("endTime")) or start_ns,
        status="error" if is_error else "ok",
        message=as_text(record.get("statusMessage")),
    )
    match kind:
        case "GENERATION":
            usage = chat_usage(record.get("usageDetails")) or chat_usage(record.get("usage"))
            part.call = call_of(
                own,
                asked,
                answered,
                model=as_text(record.get("model")) or as_text(record.get("providedModelName")),
                settings=parsed(record.get("modelParameters")),
                usage=usage,
                error=(part.message or "error") if is_error else "",
            )
        case "AGENT":
            part.attributes = agent_attributes(name)
        case "TOOL":
            part.attributes = tool_attributes(name, asked, answered)
        case _:
            given = {"langfuse.observation.input": asked, "langfuse.observation.output": answered}
            part.attributes = {key: json_text(value) for key, value in given.items() if value is not None}
    if about := _own(record):
        part.name, part.attributes = as_text(about.get("name")) or name, as_dict(about.get("attributes"))
        part.kind = _KINDS.get(as_text(about.get("kind")), "internal")
        part.status = _STATUS.get(as_text(about.get("status")), "unset")
        part.start_ns, part.end_ns = whole_ns(about.get("start_ns")), whole_ns(about.get("end_ns"))
        part.call = own_call(place, about, request=record.get("input"), response=record.get("output")) or part.call
    return trace, part


def _score(place: str, record: dict[str, Any], trace: str) -> tuple[str, Part]:
    about = _own(record)
    if trace and about.get("reward"):
        scored = Scored(
            f"score {record.get('id')}",
            own_reward(place, about["reward"]),
            about=as_text(record.get("observationId")),
            at_ns=whole_ns(about.get("at_ns")),
            is_late=about.get("is_late") is True,
            is_exact=True,
        )
        return trace, Part(rewards=[scored])
    value, words = number_of(record.get("value")), as_text(record.get("stringValue"))
    reward = judged(
        value,
        words or as_text(record.get("value")),
        as_text(record.get("comment")),
        name=as_text(record.get("name")),
        source=_SOURCES.get(as_text(record.get("source"))),
    )
    scored = Scored(
        f"score {record.get('id')}",
        reward,
        about=as_text(record.get("observationId")),
        at_ns=ns_of(record.get("timestamp")),
    )
    if not trace:
        return "", Part(lost=[_NO_TRACE])
    return trace, Part(rewards=[scored], lost=[_NO_NUMBER] if value is None else [])


def _own(record: dict[str, Any]) -> dict[str, Any]:
    """Return the object ``agl`` that ``agl data export`` wrote into the metadata; empty if there is none."""
    return as_dict(as_dict(record.get("metadata")).get("agl"))


def _is_observation(fields: dict[str, Any]) -> bool:
    return "traceId" in fields and "type" in fields and "startTime" in fields


def _camel(record: Json) -> dict[str, Any]:
    """Return a record with its field names in the API's camel case; exports to storage use underscores."""
    return {re.sub(r"_([a-z])", lambda found: found[1].upper(), name): value for name, value in as_dict(record).items()}
