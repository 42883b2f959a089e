"""Reads ATIF 1.0 to 1.8, Harbor's Agent Trajectory Interchange Format: one trajectory is one run.

A step of the agent is a model call, and the messages before it are its request. Token ids and log-probabilities are
read if a step has them. Sub-agents are embedded in the trajectory, or in files within its folder; files outside of the
folder are refused. Steps copied from another trajectory become messages of later requests, and no calls.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agl.errors import DatasetError
from agl.schemas import Json, ModelCall, pack_floats, pack_ids
from agl_data.importing.runs import CHANGED_TEXT, IDS_MISSING, Run, own_call, own_reward
from agl_data.importing.source import read_lines
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in, json_text, ns_of, number_of, whole_ns

_VERSION = re.compile(r"ATIF-v1\.([0-8])")
_MERGED = "steps that stand for several model calls: without token ids"
_CONTINUED = "trajectories that continue another one: each is a run of its own"
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_DEEPEST = 32


def fits(record: Json) -> bool:
    """Return whether a record is a trajectory."""
    return as_text(as_dict(record).get("schema_version")).startswith("ATIF")


def read(path: Path) -> Iterator[Run]:
    """Read the trajectories of a file; raises :class:`DatasetError` for an unknown version or missing steps."""
    for line in read_lines(path):
        document = as_dict(line.value)
        _check(line.place, document)
        key = "/".join(as_text(document.get(name)) for name in ("session_id", "trajectory_id"))
        run = Run(key, place=line.place, fields=document)
        run.lost[CHANGED_TEXT] += int(line.is_changed)
        run.lost[_CONTINUED] += int(bool(document.get("continued_trajectory_ref")))
        _Trajectory(run, document, path, line.place).add()
        if run.calls:
            yield run


def _check(place: str, document: dict[str, Any]) -> None:
    version = as_text(document.get("schema_version"))
    if not _VERSION.fullmatch(version):
        raise DatasetError(
            f"{place} has the schema_version {version[:60]!r}, and ATIF-v1.0 to ATIF-v1.8 are read; write the "
            "trajectory in one of them"
        )
    if not dicts_in(document.get("steps")):
        raise DatasetError(f"{place} is a trajectory without steps; remove it, or write it once more")


class _Trajectory:
    """Adds a trajectory to a run: its agent, the agent's calls and tools, and the sub-agents that these started."""

    def __init__(
        self,
        run: Run,
        document: dict[str, Any],
        path: Path,
        place: str,
        *,
        prefix: str = "",
        parent: str = "",
        depth: int = 0,
        at_ns: int = 0,
        calls: dict[str, str] | None = None,
    ) -> None:
        self._run, self._document, self._path, self._place = run, document, path, place
        self._prefix, self._parent, self._depth = prefix, parent, depth
        self._agent = as_dict(document.get("agent"))
        self._messages: list[Json] = []
        self._embedded = {
            as_text(each.get("trajectory_id")): each for each in dicts_in(document.get("subagent_trajectories"))
        }
        self._added: set[str] = set()
        self._at_ns = at_ns
        self._calls: dict[str, str] = {} if calls is None else calls
        """Keys of the run's calls, by the span ids that ``agl data export`` wrote."""

    def add(self) -> None:
        """Add the trajectory and its sub-agents."""
        steps = dicts_in(self._document.get("steps"))
        times = [found for step in steps if (found := ns_of(step.get("timestamp")))]
        start_ns, end_ns = min(times, default=self._at_ns), max(times, default=self._at_ns)
        self._at_ns = start_ns
        given = self._agent.get("name")
        name = given if isinstance(given, str) else "agent"
        agent = f"{self._prefix}agent"
        self._run.add_agent(agent, name, parent=self._parent, start_ns=start_ns, end_ns=end_ns)
        for number, step in enumerate(steps):
            self._at_ns = ns_of(step.get("timestamp")) or self._at_ns
            self._step(number, step)
        for key in [key for key in self._embedded if key not in self._added]:
            parent = "" if "agl" in as_dict(self._embedded[key].get("extra")) else agent
            self._below(self._embedded[key], self._path, self._place, key=f"embedded {key}", parent=parent)
        for number, record in enumerate(dicts_in(_own(self._document).get("rewards"))):
            self._add_reward(number, record)

    def _step(self, number: int, step: dict[str, Any]) -> None:
        role = _ROLES.get(as_text(step.get("source")))
        if role is None:
            raise DatasetError(
                f"{self._place}: step {number + 1} has the source {step.get('source')!r}; it is system, user or agent"
            )
        calls = dicts_in(step.get("tool_calls"))
        message = _message(role, step, calls)
        if role == "user" and self._run.prompt is None and not self._prefix:
            self._run.prompt = message["content"] or None
        is_sampled = role == "assistant" and step.get("llm_call_count") != 0 and not step.get("is_copied_context")
        if is_sampled:
            self._add_call(number, step, message)
        self._messages.append(message)
        results = dicts_in(as_dict(step.get("observation")).get("results"))
        named = {as_text(call.get("tool_call_id")): call for call in calls}
        for place, result in enumerate(results):
            self._add_result(f"{number} {place}", result, named)

    def _add_call(self, number: int, step: dict[str, Any], message: dict[str, Json]) -> None:
        metrics, tools = as_dict(step.get("metrics")), as_list(self._agent.get("tool_definitions"))
        model = as_text(step.get("model_name")) or as_text(self._agent.get("model_name"))
        request: dict[str, Json] = {"model": model, "messages": list(self._messages)}
        counts = {name: metrics[name] for name in ("prompt_tokens", "completion_tokens") if name in metrics}
        response: dict[str, Json] = {"model": model, "choices": [{"index": 0, "message": message}]}
        is_one = step.get("llm_call_count") in (None, 1)
        self._run.lost[_MERGED] += int(not is_one)
        tokens: dict[str, Any] = self._tokens(number, metrics) if is_one else {"ids_missing": _MERGED}
        call = ModelCall(
            request_id=f"{self._prefix}step-{number + 1}",
            dialect="chat",
            model=model,
            request={**request, **({"tools": tools} if tools else {})},
            response={**response, **({"usage": counts} if counts else {})},
            **tokens,
        )
        about = _own(step)
        own = own_call(self._place, about, request=call.request, response=call.response)
        if own is not None:
            missing = {"ids_missing": own.ids_missing} if own.ids_missing else {}
            call = msgspec.structs.replace(own, dialect="chat", **{**tokens, **missing})
        key = f"{self._prefix}call {number}"
        if own_id := as_text(about.get("span_id")):
            self._calls[own_id] = key
        start_ns = whole_ns(about.get("start_ns")) or self._at_ns
        cost, effort = number_of(metrics.get("cost_usd")), step.get("reasoning_effort")
        self._run.add_call(
            key,
            call,
            parent=f"{self._prefix}agent",
            start_ns=start_ns,
            end_ns=whole_ns(about.get("end_ns")) or start_ns,
            about={"agl.cost_usd": cost, "agl.reasoning_effort": effort},
            sequence=whole_ns(about.get("sequence")),
        )

    def _add_reward(self, number: int, record: dict[str, Any]) -> None:
        """Add a reward that ``agl data export`` wrote."""
        target = as_text(record.get("call"))
        self._run.add_reward(
            f"reward {number}",
            own_reward(self._place, record),
            about=self._calls.get(target, ""),
            at_ns=whole_ns(record.get("at_ns")),
            is_late=record.get("is_late") is True,
        )

    def _tokens(self, number: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return a call's fields from a step's metrics: packed ids and log-probabilities, or why ids are missing."""
        prompt, answer = as_list(metrics.get("prompt_token_ids")), as_list(metrics.get("completion_token_ids"))
        logprobs = as_list(metrics.get("logprobs"))
        if not prompt or not answer:
            return {"ids_missing": IDS_MISSING}
        try:
            found: dict[str, Any] = {"prompt_ids": pack_ids(prompt), "response_ids": pack_ids(answer)}
            found["logprobs"] = pack_floats(logprobs)
        except ValueError as error:
            raise DatasetError(
                f"{self._place}: step {number + 1} has token ids or logprobs that are not numbers of 32 bits "
                f"({error}); write them once more, or leave them out"
            ) from error
        if len(logprobs) != len(answer):
            found["ids_missing"] = f"{len(logprobs)} log-probabilities for {len(answer)} response tokens"
        return found

    def _add_result(self, place: str, result: dict[str, Any], calls: dict[str, dict[str, Any]]) -> None:
        call_id, content = as_text(result.get("source_call_id")), _content(result.get("content"))
        call, agent = calls.get(call_id, {}), f"{self._prefix}agent"
        role = {"role": "tool", "tool_call_id": call_id} if call else {"role": "user"}
        self._messages.append({**role, "content": content})
        key = f"{self._prefix}tool {place}"
        if call:
            self._run.add_tool(
                key,
                as_text(call.get("function_name")),
                parent=agent,
                call_id=call_id,
                arguments=call.get("arguments"),
                result=content,
                start_ns=self._at_ns,
                end_ns=self._at_ns,
            )
        for number, reference in enumerate(dicts_in(result.get("subagent_trajectory_ref"))):
            self._refer(reference, key=f"{place} {number}", parent=key if call else agent)

    def _refer(self, reference: dict[str, Any], *, key: str, parent: str) -> None:
        embedded, path = as_text(reference.get("trajectory_id")), as_text(reference.get("trajectory_path"))
        own = embedded if embedded in self._embedded else path
        if not own or own in self._added:
            return
        self._added.add(own)
        if own == embedded:
            self._below(self._embedded[embedded], self._path, self._place, key=f"embedded {embedded}", parent=parent)
        else:
            target = self._path.parent / path
            if not _is_inside(target, self._path.parent):
                raise DatasetError(
                    f"{self._place} names the sub-agent's trajectory {path[:200]!r}, which is outside of its folder; "
                    "nothing was imported: move that file next to this one, and name it there"
                )
            line = next(read_lines(target), None)
            document = as_dict(line.value) if line else {}
            _check(str(target), document)
            self._below(document, target, str(target), key=key, parent=parent)

    def _below(self, document: dict[str, Any], path: Path, place: str, *, key: str, parent: str) -> None:
        if self._depth >= _DEEPEST:
            raise DatasetError(
                f"{place}: sub-agents are nested more than {_DEEPEST} deep; look for a trajectory that names itself"
            )
        below = _Trajectory(
            self._run,
            document,
            path,
            place,
            prefix=f"{self._prefix}{key}/",
            parent=parent,
            depth=self._depth + 1,
            at_ns=self._at_ns,
            calls=self._calls,
        )
        below.add()


def named_in(path: Path) -> Iterator[Path]:
    """Yield the sub-agents' files that a file's trajectories name; raises the errors of :func:`read_lines`."""
    for line in read_lines(path):
        for step in dicts_in(as_dict(line.value).get("steps")):
            for result in dicts_in(as_dict(step.get("observation")).get("results")):
                for reference in dicts_in(result.get("subagent_trajectory_ref")):
                    target = path.parent / as_text(reference.get("trajectory_path"))
                    if target != path.parent and _is_inside(target, path.parent):
                        yield target.resolve()


def _is_inside(path: Path, folder: Path) -> bool:
    return "\0" not in str(path) and path.resolve().is_relative_to(folder.resolve())


def _own(record: dict[str, Any]) -> dict[str, Any]:
    """Return the object ``agl`` that ``agl data export`` adds to a record; empty if there is none."""
    return as_dict(as_dict(record.get("extra")).get("agl"))


def _message(role: str, step: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Json]:
    """Return a step as a chat message, including the agent's reasoning and tool calls."""
    message: dict[str, Json] = {"role": role, "content": _content(step.get("message"))}
    if role == "assistant" and step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("tool_call_id"),
                "type": "function",
                "function": {"name": call.get("function_name"), "arguments": json_text(call.get("arguments"))},
            }
            for call in calls
        ]
    return message


def _content(content: Json) -> Json:
    """Return a message's content as text or as parts of OpenAI's chat; images stay references and are not opened."""
    if not isinstance(content, list):
        return "" if content is None else json_text(content)
    return [
        {"type": "image_url", "image_url": {"url": as_text(as_dict(part.get("source")).get("path"))}}
        if part.get("type") == "image"
        else {"type": "text", "text": as_text(part.get("text"))}
        for part in dicts_in(content)
    ]
