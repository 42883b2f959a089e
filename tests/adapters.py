"""Runs a framework's agent in real rollouts against the scripted server, for tests of adapters.

The agent runs under the ``async`` runner with the tracer under test; its calls are recorded in the process or by the
gateway. :func:`play` returns the records, and :func:`check_rollouts` compares them with the calls that the server saw.
"""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from agl import semconv
from agl.contracts import Store, Tracer, Upstream
from agl.episodes import Enclosing, build_episode
from agl.schemas import (
    LLM,
    Attempt,
    Claim,
    Episode,
    Json,
    NamedResources,
    Outcome,
    Rollout,
    Span,
    new_rollout_id,
    unpack_ids,
)
from agl.stores import MemoryStore
from agl_run import AgentSpec, AsyncRunner, RunContext
from agl_testing.model_server import RecordedCall, ScriptedModelServer, decode

SECRET = b"the secret of the adapters' tests"
MODEL = "scripted"
ANYBODY = "(?s).+"
"""A pattern that matches every named caller, so that the wire hook sends the names with each call."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one rollout: its outcome, every span, and the episode that is built from them."""

    rollout: Rollout
    attempt: Attempt
    outcome: Outcome
    spans: list[Span]
    episode: Episode

    @property
    def calls(self) -> list[Span]:
        """The spans of model calls that the server answered, in order of time."""
        return [span for span in self.spans if span.call is not None and not span.call.error]

    @property
    def failed_calls(self) -> list[Span]:
        """The spans of model calls that got no answer or an error."""
        return [span for span in self.spans if span.call is not None and span.call.error]

    @property
    def agents(self) -> list[str]:
        """Names of the agents that made the answered calls, in order of time."""
        answered = {span.span_id for span in self.calls}
        return [item.agent for item in self.episode.transitions if item.span_id in answered]

    @property
    def who(self) -> list[tuple[str, str]]:
        """The agent and the path of every call that trains, sorted."""
        return sorted((item.agent, "/".join(item.path)) for item in self.episode.transitions if not item.reject)

    def named(self, name: str) -> list[Span]:
        """Return the spans of that name."""
        return [span for span in self.spans if span.name == name]

    def path_of(self, span: Span) -> list[str]:
        """Return the names of the spans around ``span`` and its own, outermost first, without the root."""
        by_id = {item.span_id: item for item in self.spans}
        names: list[str] = []
        found: Span | None = span
        while found is not None:
            names.append(found.name)
            found = by_id.get(found.parent_id or "")
        return names[::-1][1:]


def play(
    agent: Callable[..., Any] | str,
    tasks: Sequence[Json],
    *,
    server: ScriptedModelServer,
    tracers: Sequence[Tracer],
    gateway: Any = None,
    folder: str = "",
    timeout_s: float = 60.0,
) -> list[Played]:
    """Run ``agent`` on all tasks at once, in this process; the results are in the order of the tasks.

    Args:
        agent: A function of ``task`` and ``llm``, or its import path.
        tasks: One per rollout.
        server: The server that answers the agent's model calls.
        tracers: Tracers, in the order in which they are asked for the current span.
        gateway: An :class:`agl.contracts.Gateway` that is not started; ``None`` records calls in the process.
        folder: Folder to import the agent from.
        timeout_s: Time limit of each rollout.
    """
    return asyncio.run(_play(agent, tasks, server, tracers, gateway, folder, timeout_s))


async def _play(
    agent: Callable[..., Any] | str,
    tasks: Sequence[Json],
    server: ScriptedModelServer,
    tracers: Sequence[Tracer],
    gateway: Any,
    folder: str,
    timeout_s: float,
) -> list[Played]:
    upstream = Upstream(name="main_llm", base_url=server.base_url, model=MODEL, is_trained=True, agents=ANYBODY)
    async with AsyncExitStack() as stack:
        store: Store = MemoryStore()
        stack.push_async_callback(store.close)
        url = ""
        if gateway is not None:
            url = await gateway.start(store=store, upstreams=[upstream], secret=SECRET)
            stack.push_async_callback(gateway.stop)
        llm = LLM(endpoint=f"{url}/v1" if url else server.base_url, model=MODEL)
        setup = RunContext(
            agent=AgentSpec.of(agent, folder=folder),
            store=store,
            secret=SECRET,
            resources=_resources(llm),
            gateway_url=url,
            upstreams=(upstream,),
            tracers=[(type(tracer).__name__, tracer) for tracer in tracers],
            concurrency=max(8, len(tasks)),
        )
        runner = AsyncRunner(setup)
        await runner.start()
        stack.push_async_callback(runner.stop)
        claims = await _claims(store, tasks, timeout_s)
        return list(await asyncio.gather(*(_one(runner, store, gateway, *claim) for claim in claims)))


def _resources(llm: LLM) -> Any:
    async def resources(_: Rollout) -> NamedResources:
        return {"main_llm": llm}

    return resources


async def _claims(store: Store, tasks: Sequence[Json], timeout_s: float) -> list[tuple[Rollout, Attempt]]:
    rollouts = [Rollout(rollout_id=new_rollout_id(), task=task) for task in tasks]
    limited = [
        msgspec.structs.replace(r, retry=msgspec.structs.replace(r.retry, timeout_s=timeout_s)) for r in rollouts
    ]
    await store.enqueue(limited)
    claims = await store.claim(worker="adapter-test", limit=len(tasks))
    by_id = {claim.rollout.rollout_id: claim for claim in claims}
    return [(by_id[r.rollout_id].rollout, by_id[r.rollout_id].attempt) for r in rollouts]


async def _one(runner: AsyncRunner, store: Store, gateway: Any, rollout: Rollout, attempt: Attempt) -> Played:
    outcome = await runner.execute(Claim(rollout=rollout, attempt=attempt))
    if gateway is not None:
        await gateway.settle(attempt.attempt_id)
    await store.finish([outcome])
    spans = await store.spans(rollout.rollout_id)
    spans.sort(key=lambda span: (span.start_ns, span.sequence))
    ended = (await store.attempts(rollout.rollout_id))[-1]
    episode = build_episode(rollout, ended, spans)
    return Played(rollout=rollout, attempt=ended, outcome=outcome, spans=spans, episode=episode)


def check_rollouts(played: Sequence[Played], server: ScriptedModelServer, *, marker: str = "marker") -> None:
    """Check that every call is in the right rollout with the server's ids, in one tree of spans that are all closed.

    ``marker`` is the key of a text in each task that only the prompts of its own rollout contain.
    """
    answered = [call for call in server.calls if call.status == 200]
    recorded = [span for item in played for span in item.calls]
    assert len(answered) == len(recorded), "a model call was lost or recorded twice"
    assert sorted(map(_sent_ids, answered)) == sorted(map(_recorded_ids, recorded))
    for item in played:
        text = item.rollout.task[marker]  # type: ignore[call-overload,index]
        assert all(text in decode(_recorded_ids(span)[0]) for span in item.calls), f"a call is not of {text}"
        _check_tree(item)
        check_callers(item.spans)
        check_selection(item.episode, item.spans)


def check_callers(spans: Sequence[Span]) -> None:
    """Check that the names sent with each call equal those around its recorded span.

    The policy of the calls has ``agents`` set to :data:`ANYBODY`.
    """
    enclosing = Enclosing(spans)
    for span in spans:
        if span.call is not None:
            assert list(enclosing.who(span).names) == span.attributes.get(semconv.CALLER, [])


def check_selection(episode: Episode, spans: Sequence[Span]) -> None:
    """Check that tracer and recording saw the same calls, and that each agent can be selected by its name."""
    assert ((), ()) == (episode.unseen, episode.unattributed)
    for agent in {call.agent for call in episode.transitions} - {""}:
        pattern = f"^{re.escape(agent)}$"
        chosen = build_episode(episode.rollout, episode.attempt, spans, agent_match=pattern).transitions
        assert not [call for call in chosen if call.agent == agent and call.reject == "not_selected"]
        assert not [call for call in chosen if agent not in call.path and not call.reject]


def _check_tree(item: Played) -> None:
    ids = {span.span_id for span in item.spans}
    roots = [span.name for span in item.spans if span.parent_id is None]
    assert ["rollout"] == roots
    assert len(ids) == len(item.spans)
    assert [] == [span.name for span in item.spans if span.parent_id is not None and span.parent_id not in ids]
    assert [] == [span.name for span in item.spans if "still open" in span.status_message]
    assert all(span.end_ns >= span.start_ns > 0 for span in item.spans)


def _recorded_ids(span: Span) -> tuple[list[int], list[int]]:
    assert span.call is not None
    return unpack_ids(span.call.prompt_ids), unpack_ids(span.call.response_ids)


def _sent_ids(call: RecordedCall) -> tuple[list[int], list[int]]:
    """Read the ids from the response's bytes: a body, or all events of a stream."""
    text = call.sent.decode()
    if not text.startswith(("data:", "event:")):
        return _ids_of([json.loads(text)])
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    return _ids_of([json.loads(line) for line in lines if line != "[DONE]"])


def _ids_of(parts: list[Any]) -> tuple[list[int], list[int]]:
    prompt: list[int] = []
    response: list[int] = []
    for part in parts:
        answer = part.get("response", part)
        if "output_messages" in answer:
            return _tokens_of(answer["input_messages"]), _tokens_of(answer["output_messages"])
        prompt = part.get("prompt_token_ids") or prompt
        for choice in part.get("choices", ()):
            response += choice.get("token_ids") or ()
    return prompt, response


def _tokens_of(messages: list[Any]) -> list[int]:
    return [token for message in messages for token in message["tokens"]]
