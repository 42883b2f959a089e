"""Reads traces of MLflow 3, as ``Trace.to_json`` writes them: one per line, one per file, or several in an array.

Feedback on a trace becomes late rewards. Expectations, which state the right answer, are not rewards and are left out.
``--task-from`` and ``--reward`` can name fields of the trace's ``info``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agl.errors import DatasetError
from agl.schemas import Json, RewardSource, SpanEvent
from agl_data.importing.readers.payloads import call_of, chat_usage, decoded
from agl_data.importing.runs import CHANGED_TEXT, Run
from agl_data.importing.source import read_lines
from agl_data.importing.traces import Part, Scored, agent_attributes, judged, runs_of, tool_attributes
from agl_data.importing.values import as_dict, as_text, dicts_in, json_text, ns_of, number_of, whole_ns

_EXPECTED = "expectations of a trace, which are not rewards: left out"
_NO_NUMBER = "feedback that is neither a number nor yes or no: its words are kept, without a value"
_SOURCES: dict[str, RewardSource] = {"HUMAN": "human", "LLM_JUDGE": "evaluator", "CODE": "evaluator"}
_WORDS = {"yes": 1.0, "no": 0.0}  # the answers of MLflow's judges


def fits(record: Json) -> bool:
    """Return whether a record is a trace."""
    fields = as_dict(record)
    return isinstance(fields.get("info"), dict) and isinstance(as_dict(fields.get("data")).get("spans"), list)


def read(path: Path) -> Iterator[Run]:
    """Read the traces of a file; raises :class:`DatasetError` for a record that is not a trace of MLflow 3."""
    return runs_of(path, _parts(path))


def _parts(path: Path) -> Iterator[tuple[str, Part]]:
    for line in read_lines(path):
        record = as_dict(line.value)
        info = as_dict(record.get("info"))
        trace = as_text(info.get("trace_id"))
        if not fits(record) or not trace:
            raise DatasetError(
                f"{line.place} is not a trace of MLflow 3 (it has no info with a trace_id, or no data with spans), and "
                "nothing was imported; read it with MLflow 3, and write it with Trace.to_json()"
            )
        yield trace, Part(fields=info, lost=[CHANGED_TEXT] if line.is_changed else [])
        for span in dicts_in(as_dict(record["data"])["spans"]):
            yield trace, _part(line.place, span)
        for assessment in dicts_in(info.get("assessments")):
            yield trace, _assessment(assessment)


def _part(place: str, span: dict[str, Any]) -> Part:
    own = as_text(span.get("span_id"))
    if not own:
        raise DatasetError(
            f"{place} has a span without a span_id, as MLflow 2 wrote them, and nothing was imported; read it "
            "with MLflow 3, and write it with Trace.to_json()"
        )
    given = {
        name: decoded(value) if as_text(value)[:1] in ('"', "{", "[") else value  # written as JSON text
        for name, value in as_dict(span.get("attributes")).items()
    }
    asked, answered = given.pop("mlflow.spanInputs", None), given.pop("mlflow.spanOutputs", None)
    name, kind, status = as_text(span.get("name")), as_text(given.get("mlflow.spanType")), as_dict(span.get("status"))
    is_error = "ERROR" in as_text(status.get("code"))
    parent = as_text(span.get("parent_span_id"))
    part = Part(
        id=own,
        parent=parent,
        name=name,
        start_ns=whole_ns(span.get("start_time_unix_nano")),
        end_ns=whole_ns(span.get("end_time_unix_nano")),
        status="error" if is_error else "ok",
        message=as_text(status.get("message")),
        stands_for="" if parent else name,
        events=[
            SpanEvent(
                name=as_text(event.get("name")),
                time_ns=whole_ns(event.get("time_unix_nano")),
                attributes=as_dict(event.get("attributes")),
            )
            for event in dicts_in(span.get("events"))
        ],
    )
    match kind:
        case "CHAT_MODEL" | "LLM":
            part.call = call_of(
                own,
                asked,
                answered,
                model=as_text(given.get("mlflow.llm.model")) or as_text(given.get("model")),
                settings=given,
                tools=given.get("mlflow.chat.tools"),
                usage=chat_usage(given.get("mlflow.chat.tokenUsage")),
                error=(part.message or "error") if is_error else "",
            )
        case "AGENT":
            part.attributes = agent_attributes(name)
        case "TOOL":
            part.attributes = tool_attributes(name, asked, answered)
        case _:
            found = {"mlflow.spanInputs": asked, "mlflow.spanOutputs": answered}
            part.attributes = {key: json_text(value) for key, value in found.items() if value is not None}
    return part


def _assessment(found: dict[str, Any]) -> Part:
    if found.get("valid") is False:  # a later assessment replaced this one
        return Part()
    if "feedback" not in found:
        return Part(lost=[_EXPECTED])
    given = as_dict(found["feedback"]).get("value")
    value = number_of(given) if not isinstance(given, str) else _WORDS.get(given.lower())
    reward = judged(
        value,
        given,
        as_text(found.get("rationale")),
        name=as_text(found.get("assessment_name")),
        source=_SOURCES.get(as_text(as_dict(found.get("source")).get("source_type"))),
    )
    scored = Scored(
        f"assessment {found.get('assessment_id')}",
        reward,
        about=as_text(found.get("span_id")),
        at_ns=ns_of(found.get("create_time")),
    )
    return Part(rewards=[scored], lost=[_NO_NUMBER] if value is None else [])
