"""OTLP as JSON, as the collector's file exporter and ``agl otlp --output`` write it: one trace is one run.

The spans of a trace may stand anywhere in the file, so they are gathered in a temporary database first. Model calls,
agents and tools are recognised by the GenAI conventions, or by OpenInference's attributes. Of model calls one below
the other the innermost is the call, because frameworks and clients both report it.
"""

import base64
import binascii
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from agl import semconv
from agl.errors import DatasetError
from agl.schemas import ErrorInfo, Json, Reward, RewardSource, SpanEvent, SpanStatus
from agl_import.readers import genai, openinference
from agl_import.runs import CHANGED_TEXT, Run
from agl_import.source import read_lines
from agl_import.values import as_dict, as_list, as_text, dicts_in, number_of

_NO_CALLS = "traces without a model call: left out"
_NO_MESSAGES = "model calls without messages: the exporter was told to leave contents out"
_STATUS: dict[Json, SpanStatus] = {1: "ok", 2: "error", "STATUS_CODE_OK": "ok", "STATUS_CODE_ERROR": "error"}
_KINDS = ("", "internal", "server", "client", "producer", "consumer")
_SOURCES: dict[str, RewardSource] = {
    "evaluator": "evaluator",
    "environment": "environment",
    "agent": "agent",
    "hook": "hook",
    "human": "human",
}
_EVALUATION_EVENT = "gen_ai.evaluation.result"


def fits(record: Json) -> bool:
    """Return whether a record is a batch of spans."""
    return isinstance(as_dict(record).get("resourceSpans"), list)


def read(path: Path) -> Iterator[Run]:
    """Read the traces of a file; raises :class:`DatasetError` for a record that is no batch of spans."""
    with closing(sqlite3.connect("")) as gathered:  # a temporary file, which goes with the connection
        gathered.execute("CREATE TABLE spans (trace TEXT, start INTEGER, number INTEGER, data BLOB)")
        changed = _gather(path, gathered)
        gathered.execute("CREATE INDEX by_trace ON spans (trace, start, number)")
        traces = gathered.execute("SELECT trace, min(start) FROM spans GROUP BY trace ORDER BY 2, 1")
        lost = changed
        for trace, _ in traces:
            rows = gathered.execute("SELECT data FROM spans WHERE trace = ? ORDER BY start, number", (trace,))
            run = _run(path, trace, [msgspec.msgpack.decode(data) for (data,) in rows])
            run.lost[CHANGED_TEXT] += lost
            lost = 0
            yield run


def _gather(path: Path, gathered: sqlite3.Connection) -> int:
    """Write the spans of all batches into the database; returns how many batches had text that was changed."""
    number = changed = 0
    for line in read_lines(path):
        changed += int(line.is_changed)
        if not fits(line.value):
            raise DatasetError(f"{line.place} is no batch of spans (it has no resourceSpans); write one request a line")
        rows: list[tuple[str, int, int, bytes]] = []
        for span in _spans_in(line.place, as_dict(line.value)):
            number += 1
            rows.append((span["trace"], span["start"], number, msgspec.msgpack.encode(span)))
        gathered.executemany("INSERT INTO spans VALUES (?, ?, ?, ?)", rows)
    return changed


def _spans_in(place: str, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in dicts_in(batch.get("resourceSpans")):
        for scope in dicts_in(group.get("scopeSpans")):
            for span in dicts_in(scope.get("spans")):
                trace, own = _id(span.get("traceId"), 16), _id(span.get("spanId"), 8)
                if not trace or not own:
                    raise DatasetError(
                        f"{place} has a span without a traceId of 32 and a spanId of 16 hexadecimal digits; write the "
                        "file with an exporter of OTLP's JSON"
                    )
                yield {
                    "trace": trace,
                    "id": own,
                    "parent": _id(span.get("parentSpanId"), 8),
                    "name": as_text(span.get("name")),
                    "kind": span.get("kind"),
                    "start": _ns(span.get("startTimeUnixNano")),
                    "end": _ns(span.get("endTimeUnixNano")),
                    "status": as_dict(span.get("status")),
                    "attributes": _attributes(span.get("attributes")),
                    "events": [
                        {
                            "name": as_text(event.get("name")),
                            "at": _ns(event.get("timeUnixNano")),
                            "attributes": _attributes(event.get("attributes")),
                        }
                        for event in dicts_in(span.get("events"))
                    ],
                }


def _id(value: Json, size: int) -> str:
    """Return an id in hexadecimal digits, also from the base64 of plain Protobuf JSON; ``""`` for none."""
    text = as_text(value)
    try:
        data = bytes.fromhex(text) if len(text) == 2 * size else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return ""
    return data.hex() if len(data) == size and any(data) else ""


def _ns(value: Json) -> int:
    try:
        return min(max(int(value), 0), (1 << 63) - 1)
    except (TypeError, ValueError):
        return 0


def _attributes(pairs: Json) -> dict[str, Json]:
    return {as_text(pair.get("key")): _value(pair.get("value")) for pair in dicts_in(pairs)}


def _value(value: Json) -> Json:
    """Return the JSON value of an attribute."""
    fields = as_dict(value)
    for name, found in fields.items():
        match name:
            case "intValue":
                return int(found) if str(found).lstrip("-").isdecimal() else None
            case "arrayValue":
                return [_value(item) for item in as_list(as_dict(found).get("values"))]
            case "kvlistValue":
                return _attributes(as_dict(found).get("values"))
            case "stringValue" | "boolValue" | "doubleValue" | "bytesValue":
                return found
            case _:
                pass
    return None


def _run(path: Path, trace: str, spans: list[dict[str, Any]]) -> Run:
    """Make a run of the spans of a trace."""
    fields: dict[str, Json] = {}
    for span in sorted(spans, key=lambda span: bool(span["parent"])):
        fields = {**span["attributes"], **fields}
    run = Run(trace, place=f"{path}, trace {trace}", fields=fields, grows=True)
    calls = _innermost(spans)
    own = {as_text(span["attributes"].get("agl.span_id")): span["id"] for span in spans}
    for span in spans:
        attributes = openinference.as_genai(span["attributes"], span["name"])
        if span["id"] in calls:
            _add_call(run, span, attributes)
        elif "agl.status" not in attributes and not _add_evaluation(run, span, attributes, own):
            _add_other(run, span, attributes)
        for number, event in enumerate(span["events"]):
            if event["name"] == _EVALUATION_EVENT:
                about = span["id"] if span["id"] in calls else ""
                key, value = f"{span['id']} {number}", _reward(event["attributes"], is_turn=bool(about))
                run.add_reward(key, value, about=about, at_ns=event["at"])
    top = next((span for span in spans if not span["parent"]), spans[0])
    if _STATUS.get(top["status"].get("code")) == "error":
        text = as_text(top["status"].get("message"))
        run.error = ErrorInfo(type=as_text(top["attributes"].get(semconv.ERROR_TYPE)) or "error", message=text)
    run.lost[_NO_CALLS] += int(not run.calls)
    return run


def _innermost(spans: list[dict[str, Any]]) -> set[str]:
    """Return the ids of the model calls that have no model call below them."""
    found = {span["id"]: span for span in spans if genai.is_call(openinference.as_genai(span["attributes"], ""))}
    parents = {span["id"]: span["parent"] for span in spans}
    outer: set[str] = set()
    for own in found:
        above, seen = parents.get(own, ""), {own}
        while above and above not in seen:
            seen.add(above)
            outer.add(above)
            above = parents.get(above, "")
    return found.keys() - outer


def _add_call(run: Run, span: dict[str, Any], attributes: dict[str, Json]) -> None:
    error = as_text(span["status"].get("message")) or "error"
    is_error = _STATUS.get(span["status"].get("code")) == "error"
    call = genai.call_of(span["id"], attributes, error=error if is_error else "")
    messages = as_list(as_dict(call.request).get("messages"))
    run.lost[_NO_MESSAGES] += int(not messages and not is_error)
    if run.prompt is None:
        asked = (message.get("content") for message in dicts_in(messages) if message.get("role") == "user")
        run.prompt = next(asked, None)
    about = {name: value for name, value in attributes.items() if not genai.is_content(name)}
    run.add_call(span["id"], call, parent=span["parent"], start_ns=span["start"], end_ns=span["end"], about=about)


def _add_other(run: Run, span: dict[str, Any], attributes: dict[str, Json]) -> None:
    kind = span["kind"]
    number = kind if isinstance(kind, int) else 0
    name = as_text(kind).removeprefix("SPAN_KIND_").lower()
    known = name if name in _KINDS[1:] else _KINDS[number] if 0 < number < len(_KINDS) else "internal"
    run.add(
        span["id"],
        span["name"],
        parent=span["parent"],
        kind=known,
        start_ns=span["start"],
        end_ns=span["end"],
        status=_STATUS.get(span["status"].get("code"), "unset"),
        message=as_text(span["status"].get("message")),
        attributes={name: value for name, value in attributes.items() if name not in genai.MESSAGES},
        events=tuple(
            SpanEvent(name=event["name"], time_ns=event["at"], attributes=event["attributes"])
            for event in span["events"]
        ),
    )


def _add_evaluation(run: Run, span: dict[str, Any], attributes: dict[str, Json], own: dict[str, str]) -> bool:
    """Add the reward that a span of an evaluation holds; returns false for other spans."""
    if semconv.EVALUATION_NAME not in attributes:
        return False
    about = own.get(as_text(attributes.get("agl.reward.span_id")), "")
    run.add_reward(span["id"], _reward(attributes, is_turn=bool(about)), about=about, at_ns=span["start"])
    return True


def _reward(attributes: dict[str, Json], *, is_turn: bool) -> Reward:
    prefix = "agl.reward.dimensions."
    dimensions = {
        name.removeprefix(prefix): number_of(value) for name, value in attributes.items() if name.startswith(prefix)
    }
    name = as_text(attributes.get(semconv.EVALUATION_NAME))
    return Reward(
        value=number_of(attributes.get(semconv.EVALUATION_SCORE)),
        name="" if name == "reward" else name,
        dimensions=dimensions,
        scope="turn" if is_turn else "rollout",
        source=_SOURCES.get(as_text(attributes.get("agl.reward.source")), "evaluator"),
        feedback=as_text(attributes.get(semconv.EVALUATION_EXPLANATION)),
    )
