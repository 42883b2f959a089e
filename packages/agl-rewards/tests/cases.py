"""Finished attempts and databases for the tests of this package."""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl import PluginManager, semconv
from agl.contracts import RewardEmitter, RewardSetup
from agl.schemas import LLM, ModelCall, Reward, Rollout, Span, SpanStatus
from agl_testing.conformance.reward import evaluate


def rollout(task: Any) -> Rollout:
    return Rollout(rollout_id="r", task=task, attempt_id="r.1")


def chat(number: int, text: str | None, *, parent: str | None = None, tools: Any = None, **call: Any) -> Span:
    """Return a model call at second ``number`` that answered ``text``."""
    message = {"role": "assistant", "content": text, **({"tool_calls": tools} if tools else {})}
    response = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    request = {"messages": [{"role": "user", "content": "question"}]}
    made = ModelCall(request_id=f"q{number}", dialect="chat", model="m", request=request, response=response, **call)
    attributes = {semconv.OPERATION: semconv.OP_CHAT}
    return span(number, "chat m", attributes=attributes, parent=parent, call=made)


def tool(number: int, name: str = "search", *, status: SpanStatus = "ok", **fields: Any) -> Span:
    arguments = fields.pop("arguments", None)
    attributes = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: name}
    if arguments is not None:
        attributes[semconv.TOOL_ARGUMENTS] = arguments
    return span(number, f"execute_tool {name}", attributes=attributes, status=status, **fields)


def agent(number: int, name: str, *, seconds: int = 1) -> Span:
    attributes = {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: name}
    return span(number, f"invoke_agent {name}", attributes=attributes, seconds=seconds)


def root(output: Any) -> Span:
    return span(0, semconv.ROOT_SPAN_NAME, attributes={semconv.OUTPUT: output}, seconds=1000)


def emitted(number: int, name: str, value: Any) -> Span:
    return span(number, f"object {name}", attributes={semconv.OBJECT: value})


def span(
    number: int,
    name: str,
    *,
    attributes: dict[str, Any] | None = None,
    parent: str | None = None,
    status: SpanStatus = "ok",
    seconds: int = 1,
    message: str = "",
    call: ModelCall | None = None,
) -> Span:
    return Span(
        rollout_id="r",
        attempt_id="r.1",
        span_id=f"s{number}",
        parent_id=parent,
        name=name,
        sequence=number + 1,
        start_ns=(number + 1) * 10**9,
        end_ns=(number + 1 + seconds) * 10**9,
        status=status,
        status_message=message,
        attributes=attributes or {},
        call=call,
    )


def setup(folder: Path | str = ".", **policies: LLM) -> RewardSetup:
    """The settings that emitters receive for an experiment in ``folder``, with only this package's plugin."""
    from agl_rewards import plugin

    manager = PluginManager()
    manager.register(plugin, name="rewards")

    def build(use: str, params: Any) -> RewardEmitter:
        entry = manager.reward(use)
        return manager.build(entry, **({**params, "setup": made} if entry.takes_setup else params))

    made = RewardSetup(folder=Path(folder), policies=policies, build=build)
    return made


def one(emitter: RewardEmitter, task: Any, spans: Sequence[Span] | str) -> Reward:
    """Return the only reward of an attempt; a text stands for one answer."""
    given = [chat(1, spans)] if isinstance(spans, str) else spans
    (reward,) = evaluate(emitter, rollout(task), given)
    return reward


def several(emitter: RewardEmitter, task: Any, spans: Sequence[Span]) -> list[Reward]:
    return evaluate(emitter, rollout(task), spans)


def database(path: Path) -> Path:
    """Create a database of singers and songs, with a full-text index and a name that contains a space."""
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER);
        CREATE TABLE "my songs" (singer INTEGER, title TEXT, length REAL);
        INSERT INTO singer VALUES (1, 'Ada', 40), (2, 'Bo', 30), (3, 'Cy', 30);
        INSERT INTO "my songs" VALUES (1, 'Sun', 3.5), (1, 'Moon', 4.0), (2, 'Sun', 2.25);
        CREATE VIRTUAL TABLE page USING fts5(body);
        INSERT INTO page VALUES ('the sun is far'), ('the moon is near');
        """
    )
    connection.commit()
    connection.close()
    return path


def run(work: Any) -> Any:
    return asyncio.run(work)
