"""Reads OTLP in the forms that the collector's file exporter, HTTP exporters and ``agl data otlp --output`` write.

One trace is one run. Files may be JSON or Protobuf. Model calls, agents and tools are recognised by attributes of the
GenAI conventions, OpenInference or Langfuse.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from agl import semconv
from agl.errors import DatasetError
from agl.schemas import Json, Reward, RewardSource, SpanEvent, SpanStatus
from agl_data.importing.readers import genai
from agl_data.importing.readers.attributes import LANGFUSE_CONTENT, as_genai
from agl_data.importing.readers.payloads import parsed
from agl_data.importing.runs import Run, own_call, own_reward
from agl_data.importing.source import Line, read_lines
from agl_data.importing.traces import Kind, Part, Scored, marked, runs_of
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in, number_of, whole_ns
from agl_data.importing.wire import read_batches

_STATUS: dict[str, SpanStatus] = {"1": "ok", "2": "error", "STATUS_CODE_OK": "ok", "STATUS_CODE_ERROR": "error"}
_WHOLE = re.compile("-?[0-9]{1,99}")
_KINDS: tuple[Kind, ...] = ("internal", "internal", "server", "client", "producer", "consumer")
_NAMED: dict[str, Kind] = {kind: kind for kind in _KINDS}
_SOURCES: dict[str, RewardSource] = {source: source for source in get_args(RewardSource)}
_CALL, _REWARD = "agl.call", "agl.reward_record"
"""Attributes in which ``agl data otlp`` writes the whole record of a call or a reward, as JSON."""

_EVALUATION_EVENT = "gen_ai.evaluation.result"


def fits(record: Json) -> bool:
    """Return whether a record is a batch of spans."""
    return isinstance(as_dict(record).get("resourceSpans"), list)


def read(path: Path) -> Iterator[Run]:
    """Read the traces of a file; raises :class:`DatasetError` for a record that is not a batch of spans."""
    return runs_of(path, _parts(path), content=(*genai.CONTENT, *LANGFUSE_CONTENT))


def _parts(path: Path) -> Iterator[tuple[str, Part]]:
    for line in read_batches(path) or read_lines(path):
        if not fits(line.value):
            raise DatasetError(
                f"{line.place} is not a batch of spans (it has no resourceSpans); write one request a line"
            )
        yield from marked(line, _spans_in(line))


def _spans_in(line: Line) -> Iterator[tuple[str, Part]]:
    for group in dicts_in(as_dict(line.value).get("resourceSpans")):
        for scope in dicts_in(group.get("scopeSpans")):
            for span in dicts_in(scope.get("spans")):
                trace, own = _id(span.get("traceId"), 16), _id(span.get("spanId"), 8)
                if not trace or not own:
                    raise DatasetError(
                        f"{line.place} has a span without a traceId of 32 and a spanId of 16 hexadecimal digits; write "
                        "the file with an exporter of OTLP"
                    )
                yield trace, _part(line.place, own, span)


def _part(place: str, own: str, span: dict[str, Any]) -> Part:
    name, status = as_text(span.get("name")), as_dict(span.get("status"))
    given = _attributes(span.get("attributes"))
    attributes = as_genai(given, name)
    part = Part(
        id=own,
        parent=_id(span.get("parentSpanId"), 8),
        alias=as_text(given.get("agl.span_id")),
        name=name,
        kind=_kind(span.get("kind")),
        start_ns=_ns(span.get("startTimeUnixNano")),
        end_ns=_ns(span.get("endTimeUnixNano")),
        status=_STATUS.get(str(status.get("code")), "unset"),
        message=as_text(status.get("message")),
        is_left_out="agl.status" in given,
    )
    for number, event in enumerate(dicts_in(span.get("events"))):
        about, at_ns = _attributes(event.get("attributes")), _ns(event.get("timeUnixNano"))
        title = as_text(event.get("name"))
        if title == _EVALUATION_EVENT:
            scored = Scored(f"{own} {number}", _reward(about), about=own, at_ns=at_ns)
            part.rewards = [*part.rewards, scored]
        part.events = [*part.events, SpanEvent(name=title, time_ns=at_ns, attributes=about)]
    if genai.is_call(attributes):
        error = (part.message or "error") if part.status == "error" else ""
        part.call = genai.call_of(own, attributes, error=error)
        record = parsed(attributes.pop(_CALL, None))
        about, made = {"call": record}, part.call
        part.call = own_call(place, about, request=made.request, response=made.response) or made
        part.attributes = attributes
    elif semconv.EVALUATION_NAME in attributes:
        about = as_text(attributes.get("agl.reward.span_id"))
        record = parsed(attributes.pop(_REWARD, None))
        if record:
            scope = as_dict(record).get("scope")
            scored = Scored(
                own,
                own_reward(place, record),
                about=about or (part.parent if scope == "span" else ""),
                at_ns=part.start_ns,
                is_late=attributes.get("agl.is_late") is True,
                is_exact=True,
            )
        else:
            scored = Scored(own, _reward(attributes), about=about, at_ns=part.start_ns)
        part.rewards = [*part.rewards, scored]
        part.fields, part.is_left_out = attributes, True
    else:
        part.attributes = {key: value for key, value in attributes.items() if key not in genai.MESSAGES}
    return part


def _kind(value: Json) -> Kind:
    number = value if isinstance(value, int) else 0
    name = as_text(value).removeprefix("SPAN_KIND_").lower()
    return _KINDS[number] if 0 < number < len(_KINDS) else _NAMED.get(name, "internal")


def _id(value: Json, size: int) -> str:
    """Return an id in hexadecimal digits, from hex or base64 (plain Protobuf JSON); ``""`` if it is not valid."""
    text = as_text(value)
    try:
        data = bytes.fromhex(text) if len(text) == 2 * size else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return ""
    return data.hex() if len(data) == size and any(data) else ""


def _ns(value: Json) -> int:
    return whole_ns(int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else value)


def _attributes(pairs: Json) -> dict[str, Json]:
    return {as_text(pair.get("key")): _value(pair.get("value")) for pair in dicts_in(pairs)}


def _value(value: Json) -> Json:
    """Convert an attribute's value from OTLP's ``AnyValue`` to plain JSON."""
    fields = as_dict(value)
    for name, found in fields.items():
        match name:
            case "intValue":
                return int(found) if _WHOLE.fullmatch(str(found)) else None
            case "arrayValue":
                return [_value(item) for item in as_list(as_dict(found).get("values"))]
            case "kvlistValue":
                return _attributes(as_dict(found).get("values"))
            case "stringValue" | "boolValue" | "doubleValue" | "bytesValue":
                return found
            case _:
                pass
    return None


def _reward(attributes: dict[str, Json]) -> Reward:
    prefix = "agl.reward.dimensions."
    dimensions = {
        name.removeprefix(prefix): number_of(value) for name, value in attributes.items() if name.startswith(prefix)
    }
    name = as_text(attributes.get(semconv.EVALUATION_NAME))
    return Reward(
        value=number_of(attributes.get(semconv.EVALUATION_SCORE)),
        name="" if name == "reward" else name,
        dimensions=dimensions,
        source=_SOURCES.get(as_text(attributes.get("agl.reward.source")), "evaluator"),
        feedback=as_text(attributes.get(semconv.EVALUATION_EXPLANATION)),
    )
