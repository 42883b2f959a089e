"""Reads LangSmith's runs and feedback.

The files have one record per line, as its client lists them, or are saved responses of its API.

LangSmith calls every operation of a trace a run: a model call, a tool or another step. All runs of one trace make one
imported run, in which the top run and the nodes of LangGraph are agents. Feedback becomes late rewards. If the file has
no feedback records, the means in the top run's statistics become the rewards.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agl.errors import DatasetError
from agl.schemas import Json, Reward, RewardSource
from agl_data.importing.readers.payloads import call_of, chat_usage, parsed
from agl_data.importing.runs import Run
from agl_data.importing.source import Line, read_lines
from agl_data.importing.traces import Part, Scored, agent_attributes, judged, marked, runs_of, tool_attributes
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in, first, json_text, ns_of, number_of

_NO_NUMBER = "feedback that is not a number: its text is kept, without a value"
_ATTACHED = "attachments of runs: left out"
_NO_TRACE = "feedback without a run: left out"
_SOURCES: dict[str, RewardSource] = {"app": "human", "api": "evaluator", "model": "evaluator", "auto_eval": "evaluator"}
_STARTED = re.compile(r"\d{8}T\d{6}\d*Z")


def fits(record: Json) -> bool:
    """Return whether a record is a run, feedback, or a list of runs."""
    fields = as_dict(record)
    runs = dicts_in(fields.get("runs"))
    return bool(runs and all(map(_is_run, runs))) or _is_run(fields) or {"run_id", "key", "score"} <= fields.keys()


def read(path: Path) -> Iterator[Run]:
    """Read the traces of a file; raises :class:`DatasetError` for a record that is neither run nor feedback."""
    return runs_of(path, _parts(path))


def _parts(path: Path) -> Iterator[tuple[str, Part]]:
    for line in read_lines(path):
        if not fits(line.value):
            raise DatasetError(
                f"{line.place} is neither a run nor feedback of LangSmith, and nothing was imported; write what its "
                "client lists, one a line, with model_dump_json()"
            )
        yield from marked(line, _records(line, as_dict(line.value)))


def _records(line: Line, record: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    if "runs" in record:
        for run in dicts_in(record["runs"]):
            yield from _records(line, run)
    elif _is_run(record):
        yield _part(line.place, record)
        for below in dicts_in(record.get("child_runs")):
            yield from _records(line, below)
    else:
        yield _feedback(record)


def _part(place: str, record: dict[str, Any]) -> tuple[str, Part]:
    own, parent = as_text(record.get("id")), as_text(record.get("parent_run_id"))
    above = as_text(record.get("dotted_order")).partition(".")[0]
    trace = as_text(record.get("trace_id")) or _STARTED.sub("", above, count=1) or ("" if parent else own)
    if not own or not trace:
        raise DatasetError(
            f"{place} is a run without its id or that of its trace, and nothing was imported; list it with both"
        )
    name, kind, error = as_text(record.get("name")), as_text(record.get("run_type")), as_text(record.get("error"))
    metadata = as_dict(as_dict(parsed(record.get("extra"))).get("metadata"))
    asked, answered = parsed(record.get("inputs")), parsed(record.get("outputs"))
    part = Part(
        id=own,
        parent=parent,
        name=name,
        start_ns=ns_of(record.get("start_time")),
        end_ns=ns_of(record.get("end_time")),
        status="error" if error else "ok",
        message=error,
        lost=[_ATTACHED] if record.get("attachments") else [],
    )
    match kind:
        case "llm":
            part.call = _call(record, metadata, asked, answered)
        case "tool":
            call_id = as_text(as_dict(answered).get("tool_call_id"))
            part.attributes = tool_attributes(name, _only(asked, "input"), _only(answered, "output"), call_id=call_id)
        case _:
            given = {"langsmith.inputs": asked, "langsmith.outputs": answered}
            part.attributes = {key: json_text(value) for key, value in given.items() if value}
            if name and metadata.get("langgraph_node") == name:
                part.attributes |= agent_attributes(name)
    if not parent:
        part.stands_for, part.fields = name, record
        part.rewards, part.lost = _means(record), [*part.lost, *_wordless(record)]
    return trace, part


def _call(record: dict[str, Any], metadata: dict[str, Any], asked: Json, answered: Json) -> Any:
    settings = as_dict(as_dict(parsed(record.get("extra"))).get("invocation_params"))
    names = ("temperature", "max_tokens", "stop")
    known = {name: metadata[f"ls_{name}"] for name in names if metadata.get(f"ls_{name}") is not None}
    usage = first(map(chat_usage, _counted(record, metadata, as_dict(answered))))
    return call_of(
        as_text(record.get("id")),
        asked,
        answered,
        model=as_text(first((as_dict(asked).get("model"), metadata.get("ls_model_name"), settings.get("model")))),
        settings={**known, **settings},
        tools=settings.get("tools"),
        usage=usage,
        error=as_text(record.get("error")),
    )


def _counted(record: dict[str, Any], metadata: dict[str, Any], answered: dict[str, Any]) -> Iterator[Json]:
    """Yield the values that may hold a run's token counts, starting with the run's own totals."""
    yield record
    yield metadata.get("usage_metadata")
    yield answered.get("usage_metadata")
    for generation in dicts_in(first(as_list(answered.get("generations")))):  # LangChain's form of answers
        message = as_dict(generation.get("message"))
        yield as_dict(message.get("kwargs")).get("usage_metadata") or message.get("usage_metadata")
    output = as_dict(answered.get("llm_output"))
    yield output.get("token_usage") or output.get("usage")


def _only(value: Json, name: str) -> Json:
    """Return an object's field ``name`` if it is the only field, else the whole value."""
    fields = as_dict(value)
    return fields[name] if fields.keys() == {name} else value


def _means(record: dict[str, Any]) -> list[Scored]:
    """Return the means in a run's feedback statistics as rewards, to be used if the file lacks the feedback itself."""
    own = as_text(record.get("id"))
    means = {key: number_of(as_dict(found).get("avg")) for key, found in as_dict(record.get("feedback_stats")).items()}
    return [
        Scored(f"mean {own} {key}", Reward(value=value, name=key, source="evaluator"), is_mean=True)
        for key, value in means.items()
        if value is not None
    ]


def _wordless(record: dict[str, Any]) -> list[str]:
    stats = as_dict(record.get("feedback_stats"))
    return [_NO_NUMBER for found in stats.values() if number_of(as_dict(found).get("avg")) is None]


def _feedback(record: dict[str, Any]) -> tuple[str, Part]:
    value, about = number_of(record.get("score")), as_text(record.get("run_id"))
    trace = as_text(record.get("trace_id")) or about
    reward = judged(
        value,
        record.get("value"),
        as_text(record.get("comment")),
        name=as_text(record.get("key")),
        source=_SOURCES.get(as_text(as_dict(record.get("feedback_source")).get("type"))),
    )
    if not trace:
        return "", Part(lost=[_NO_TRACE])
    key = f"feedback {as_text(record.get('id')) or f'{about} {reward.name}'}"
    target = "" if about == trace else about  # feedback on the top run is about the whole trace
    scored = Scored(key, reward, about=target, at_ns=ns_of(record.get("created_at")))
    return trace, Part(rewards=[scored], lost=[_NO_NUMBER] if value is None else [])


def _is_run(fields: dict[str, Any]) -> bool:
    return {"id", "run_type"} <= fields.keys()
