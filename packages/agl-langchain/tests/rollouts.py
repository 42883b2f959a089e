"""Runs agents as an experiment would; returns the records, together with the requests that the model server saw."""

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agl.contracts import RolloutQuery, Tracer, Upstream
from agl.episodes import build_episode
from agl.schemas import LLM, Attempt, Episode, ModelCall, Rollout, Span, new_rollout_id, unpack_ids
from agl.stores import MemoryStore
from agl.tracing import OtelTracer, WireTracer
from agl_gateway.embedded import EmbeddedGateway
from agl_run import AgentSpec, AsyncRunner, RunContext, Worker
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Status, ToolCall
from tests.adapters import ANYBODY, check_callers, check_selection

SECRET = b"0123456789abcdef0123456789abcdef"
MARK = re.compile(r"#\d+#")


@dataclass(frozen=True, kw_only=True)
class Played:
    """One finished rollout."""

    mark: str
    attempt: Attempt
    spans: list[Span]
    episode: Episode

    @property
    def calls(self) -> list[ModelCall]:
        return [span.call for span in self.spans if span.call is not None]

    @property
    def who(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the agent and the path of every training call, in order."""
        return [(t.agent, t.path) for t in self.episode.transitions if not t.reject]

    def named(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found


class Script:
    """Scripts the model: it calls each offered tool once, then answers; a prompt can ask for failures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[str, list[int]] = {}

    def __call__(self, request: ModelRequest) -> Reply | Status:
        text = json.dumps(request.body)
        mark = mark_of(text)
        if "fail twice" in text:
            with self._lock:
                left = self._faults.setdefault(mark, [500, 429])
                if left:
                    return Status(code=left.pop(), retry_after=0.01)
        if "refuse" in text:
            return Status(code=400)
        tools = [tool.get("function", tool)["name"] for tool in request.body.get("tools", ())]
        answered = any(turn.role == "tool" for turn in request.turns)
        if tools and not answered:
            calls = tuple(ToolCall(name, _arguments(name, mark)) for name in tools)
            return Reply(tool_calls=calls, chunk_delay=0.001)
        return Reply(text=f"answer to {mark}", chunk_delay=0.001)


def _arguments(tool: str, mark: str) -> dict[str, str]:
    return {} if tool.startswith("transfer") else {"question": f"{tool} {mark}"}


def mark_of(text: str) -> str:
    found = MARK.search(text)
    assert found, text
    return found[0]


def play(
    agent: Any, server: ScriptedModelServer, *tracers: Tracer, count: int = 1, gateway: bool = False, task: str = ""
) -> list[Played]:
    """Run ``count`` rollouts at once; the question of each contains a different mark."""
    return asyncio.run(_play(agent, server, tracers, count=count, gateway=gateway, task=task))


async def _play(
    agent: Any, server: ScriptedModelServer, tracers: Sequence[Tracer], *, count: int, gateway: bool, task: str
) -> list[Played]:
    store = MemoryStore("memory://")
    upstream = Upstream(name="main", base_url=server.base_url, model="scripted", is_trained=True, agents=ANYBODY)
    proxy = EmbeddedGateway() if gateway else None
    url = "" if proxy is None else await proxy.start(store=store, upstreams=[upstream], secret=SECRET)
    llm = LLM(endpoint=f"{url}/v1" if url else server.base_url, model="scripted")

    async def resources(_: Rollout) -> dict[str, Any]:
        return {"main": llm}

    setup = RunContext(
        agent=AgentSpec.of(agent),
        store=store,
        secret=SECRET,
        resources=resources,
        gateway_url=url,
        gateway=proxy,
        upstreams=(upstream,),
        tracers=[
            *((type(tracer).__name__, tracer) for tracer in tracers),
            ("otel", OtelTracer()),
            ("wire", WireTracer()),
        ],
        concurrency=count,
    )
    rollouts = [Rollout(rollout_id=new_rollout_id(), task={"question": f"#{i}# {task}"}) for i in range(count)]
    async with Worker(setup, AsyncRunner(setup)):
        await store.enqueue(rollouts)
        played = [await _finished(store, rollout.rollout_id) for rollout in rollouts]
    if proxy is not None:
        await proxy.stop()
    return played


async def _finished(store: MemoryStore, rollout_id: str) -> Played:
    cursor = 0
    async with asyncio.timeout(30):
        while True:
            (rollout,) = await store.rollouts(RolloutQuery(ids=(rollout_id,)))
            if rollout.is_finished:
                break
            changes = await store.changes(after=cursor, wait_s=5)
            cursor = changes[-1].cursor if changes else cursor
    (attempt,) = await store.attempts(rollout_id)
    spans = await store.spans(rollout_id)
    episode = build_episode(rollout, attempt, spans)
    return Played(mark=mark_of(str(rollout.task)), attempt=attempt, spans=spans, episode=episode)


def check(played: Sequence[Played], server: ScriptedModelServer, *, errors: int = 0) -> None:
    """Check that calls are complete and in place, ids are the server's, spans form one tree, and all are closed."""
    for run in played:
        sent = [call for call in server.calls if mark_of(call.body.decode()) == run.mark]
        assert len(sent) == len(run.calls)
        assert {run.mark} == {mark_of(json.dumps(call.request)) for call in run.calls}
        answered = {ids.response_id: ids for ids in map(sent_ids, sent) if ids}
        good = [call for call in run.calls if not call.error]
        assert (len(sent) - errors, len(answered)) == (len(good), len(good))
        for call in good:
            ids = answered[call.response["id"]]
            assert (ids.prompt, ids.response) == (unpack_ids(call.prompt_ids), unpack_ids(call.response_ids))
        check_tree(run)
        check_callers(run.spans)
        check_selection(run.episode, run.spans)
    assert len(server.calls) == sum(len(run.calls) for run in played)


def check_tree(run: Played) -> None:
    """Check that all spans form one tree in which a span of the framework encloses every model call."""
    ids = {span.span_id: span for span in run.spans}
    assert len(ids) == len(run.spans)
    assert [] == [span.name for span in run.spans if "still open" in span.status_message]
    roots = [span for span in run.spans if span.parent_id is None]
    assert ["rollout"] == [span.name for span in roots]
    assert [] == [span.name for span in run.spans if span.parent_id is not None and span.parent_id not in ids]
    parents = [ids[str(span.attributes["agl.framework_span_id"])] for span in run.spans if span.call is not None]
    assert {"chat"} >= {str(parent.attributes.get("gen_ai.operation.name")) for parent in parents}


@dataclass(frozen=True)
class SentIds:
    """The tokens of one prompt and answer, as the server sent them."""

    response_id: str
    prompt: list[int]
    response: list[int]


def sent_ids(call: Any) -> SentIds | None:
    if call.status != 200:
        return None
    lines = call.sent.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")] or [json.loads(call.sent)]
    prompts = [event["prompt_token_ids"] for event in events if event.get("prompt_token_ids")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    response = [token for choice in choices for token in choice.get("token_ids") or ()]
    return SentIds(events[0]["id"], prompts[0], response)
