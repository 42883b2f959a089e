"""Reads the events of Agent Lightning 1.0, as its server's ``GET /rollouts/ID/events`` returns them.

A file holds the events of one rollout as a JSON array, or those of several rollouts one after the other, as arrays or
one event a line. Token ids and log-probabilities are read from the answers, where vLLM puts them.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from agl.dialects import Exchange, Request, calls_of
from agl.errors import DatasetError
from agl.schemas import Dialect, Json, Reward
from agl_data.importing.runs import CHANGED_TEXT, Run
from agl_data.importing.source import Line, read_lines
from agl_data.importing.values import as_dict, as_text, dicts_in, ns_of_seconds, number_of, whole_of

_OTHERS = "events that are neither model calls nor rewards"


def fits(record: Json) -> bool:
    """Return whether a record is an event."""
    return {"event_type", "rollout_id", "data"} <= as_dict(record).keys()


def read(path: Path) -> Iterator[Run]:
    """Read the attempts of a file; raises :class:`DatasetError` for a line that is no event."""
    for key, events in groupby(read_lines(path), key=_attempt):
        run = None
        for number, line in enumerate(events):
            run = run or Run(key, place=line.place, fields=line.value)
            _add(run, number, line)
        if run is not None and run.calls:
            yield run


def _attempt(line: Line) -> str:
    if not fits(line.value):
        raise DatasetError(
            f"{line.place} is no event of Agent Lightning 1.0; save what GET /rollouts/ID/events returns, one rollout "
            "after the other"
        )
    event = as_dict(line.value)
    return f"{event['rollout_id']}/{event.get('attempt_id', '')}"


def _add(run: Run, number: int, line: Line) -> None:
    event = as_dict(line.value)
    data, at_ns = as_dict(event["data"]), ns_of_seconds(event.get("timestamp"))
    run.lost[CHANGED_TEXT] += int(line.is_changed)
    if event["event_type"] == "model_request":
        _add_call(run, f"call {number}", data, end_ns=at_ns)
    elif event["event_type"] == "reward" and (value := number_of(data.get("value"))) is not None:
        run.add_reward(f"reward {number}", Reward(value=value, feedback=as_text(data.get("message"))), at_ns=at_ns)
    else:
        run.lost[_OTHERS] += 1


def _add_call(run: Run, key: str, data: dict[str, Json], *, end_ns: int) -> None:
    request, latency_s = as_dict(data.get("request")), (number_of(data.get("latency_ms")) or 0) / 1000
    dialect: Dialect = "chat" if "messages" in request else "completions"
    exchange = Exchange(
        request=Request(dialect, msgspec.json.encode(request)),
        request_id=key,
        status=whole_of(data.get("http_status")) or 200,
        response=msgspec.json.encode(data.get("response")),
        latency_s=latency_s,
    )
    version = "" if (number := data.get("model_version")) is None else str(number)
    for call in calls_of(exchange, model_version=version):
        if run.prompt is None and dialect == "chat":
            messages = dicts_in(request["messages"])
            run.prompt = next((each.get("content") for each in messages if each.get("role") == "user"), None)
        run.add_call(
            f"{key} {call.request_id}", call, start_ns=max(0, end_ns - ns_of_seconds(latency_s)), end_ns=end_ns
        )
