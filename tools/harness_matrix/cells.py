"""The cells of the matrix: what a harness is made to do, and the account of every sampled token afterwards."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agl import semconv
from agl.contracts import RolloutQuery, Upstream
from agl.episodes import build_episode
from agl.schemas import Episode, Rollout, Span, new_rollout_id
from agl.stores import MemoryStore
from agl_gateway.embedded import EmbeddedGateway
from agl_harness.installation import Program
from agl_harness.table import Harness, Model
from agl_run.access import AttemptTokens
from agl_testing.model_server import Cut, Reply, ScriptedModelServer, Status, Step
from tools.harness_matrix.brain import ANSWER, SUMMARY, Brain
from tools.harness_matrix.launch import Ended, run_harness

AGAIN = "Say it once more."
TASK = "Make the file as you were told, then say that all is done."
_PARALLEL = ("echo made > made-1.txt", "echo made > made-2.txt")
_SECRET = b"a secret of the harness matrix only"
_CAUSES = frozenset({"error", "incomplete", "superseded"})


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Settings of one harness that the table of harnesses does not have.

    Attributes:
        resume: Arguments that go on with the last session.
        compact: Prompt of a second run that makes the conversation shorter; ``""`` where it happens by itself.
        compact_arguments: Arguments, variables, files and the size of the context that make it happen.
        lacks: Scenarios that the harness does not have, with the reason.
        kind: The type of its sub-agents.
    """

    resume: tuple[str, ...] = ()
    compact: str = ""
    compact_arguments: tuple[str, ...] = ()
    compact_variables: dict[str, str] = field(default_factory=dict[str, str])
    compact_files: dict[str, str] = field(default_factory=dict[str, str])
    compact_context: int = 1_000_000
    lacks: dict[str, str] = field(default_factory=dict[str, str])
    kind: str = "general-purpose"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a cell: ``""`` as its cause if it is green, and what was counted."""

    harness: str
    scenario: str
    cause: str
    calls: int = 0
    helpers: int = 0
    rows: int = 0
    agents: tuple[str, ...] = ()
    status: int = 0
    seconds: float = 0.0


class Bench:
    """One cell at work: a scripted model, a gateway, a store, and an attempt that the harness calls as."""

    def __init__(self, brain: Brain, url: str, server: ScriptedModelServer) -> None:
        self.brain = brain
        self.url = url
        self.server = server
        self.attempt_id = ""
        self.token = ""


@asynccontextmanager
async def bench(brain: Brain) -> AsyncGenerator[tuple[Bench, MemoryStore, EmbeddedGateway]]:
    """Start all that a cell needs, on ports of its own."""
    store, gateway = MemoryStore(), EmbeddedGateway()
    with ScriptedModelServer(default=Reply(text=ANSWER), flavour="every") as server:
        server.respond_with(brain)
        policy = Upstream(name="main_llm", base_url=server.base_url, model="scripted", is_trained=True)
        url = await gateway.start(store=store, upstreams=[policy], secret=_SECRET)
        try:
            made = Bench(brain, url, server)
            await store.enqueue([Rollout(rollout_id=new_rollout_id(), task={"task": TASK})])
            (claim,) = await store.claim(worker="matrix")
            made.attempt_id = claim.attempt.attempt_id
            made.token = AttemptTokens(_SECRET).issue(
                claim.attempt.rollout_id, made.attempt_id, expires_at=time.time() + 3600
            )
            yield made, store, gateway
        finally:
            await gateway.stop()
            await store.close()


async def play(harness: Harness, program: Program, knobs: Knobs, scenario: str, folder: Path) -> Result:
    """Run one cell, and account for its tokens."""
    if scenario in knobs.lacks:
        return Result(harness=harness.name, scenario=scenario, cause=knobs.lacks[scenario])
    brain = _brain(scenario, knobs)
    started = time.monotonic()
    async with bench(brain) as (it, store, gateway):
        ended = await _run(harness, program, knobs, scenario, folder, it)
        await gateway.settle(it.attempt_id)
        rollout_id = it.attempt_id.rpartition(".")[0]
        spans = await store.spans(rollout_id, attempt_id=it.attempt_id, limit=10_000)
        (rollout,) = await store.rollouts(RolloutQuery(ids=(rollout_id,)))
        (attempt,) = await store.attempts(rollout_id)
    episode = build_episode(rollout, attempt, spans, policy="main_llm")
    calls = [span for span in spans if span.call is not None]
    said = [{"headers": dict(call.headers), "body": call.json} for call in it.server.calls]
    (folder / "calls.json").write_bytes(msgspec.json.encode(said))
    (folder / "printed.txt").write_text("\n=====\n".join(one.printed for one in ended), encoding="utf-8")
    cause = account(calls, episode) or _shown(scenario, brain, ended, folder, calls)
    return Result(
        harness=harness.name,
        scenario=scenario,
        cause=cause,
        calls=len(calls),
        helpers=sum(_is_helper(span) for span in calls),
        rows=len(episode.rows),
        agents=tuple(sorted({one.agent for one in episode.transitions if one.agent})),
        status=ended[-1].status,
        seconds=time.monotonic() - started,
    )


def _brain(scenario: str, knobs: Knobs) -> Brain:
    commands: dict[str, tuple[str, ...]] = {
        "tool": ("echo made > made-1.txt",),
        "parallel tools": _PARALLEL,
        "compaction": ("echo made > made-1.txt; seq 1 3000",),
    }
    faults: dict[str, tuple[Step, ...]] = {
        "429 and retry": (Status(code=429, retry_after=1),),
        "stream cut": (Cut(after_chunks=3, reply=Reply(text=ANSWER)),),
    }
    return Brain(
        commands=commands.get(scenario, ()),
        delegates=scenario == "sub-agent",
        faults=faults.get(scenario, ()),
        kind=knobs.kind,
    )


async def _run(harness: Harness, program: Program, knobs: Knobs, scenario: str, folder: Path, it: Bench) -> list[Ended]:
    is_compaction = scenario == "compaction"
    context = knobs.compact_context if is_compaction else 1_000_000
    model = Model(base_url=f"{it.url}/v1", key=it.token, name="scripted", context=context, output=8_000)
    first = await run_harness(
        harness,
        program,
        model=model,
        prompt=TASK,
        folder=folder,
        arguments=knobs.compact_arguments if is_compaction and not knobs.compact else (),
        variables=knobs.compact_variables if is_compaction else None,
        files=knobs.compact_files if is_compaction else None,
    )
    prompts = {"resume": (AGAIN,), "compaction": (knobs.compact, AGAIN)}.get(scenario, ())
    later = [
        await run_harness(
            harness,
            program,
            model=model,
            prompt=prompt,
            folder=folder,
            arguments=(*knobs.resume, *(knobs.compact_arguments if is_compaction else ())),
            variables=knobs.compact_variables if is_compaction else None,
            files=knobs.compact_files if is_compaction else None,
        )
        for prompt in prompts
        if prompt
    ]
    return [first, *later]


def _is_helper(span: Span) -> bool:
    return span.attributes.get(semconv.ROLE) == semconv.HELPER


def account(calls: Sequence[Span], episode: Episode) -> str:
    """Return what is wrong with the rows of an attempt; ``""`` if each sampled token is in exactly one of them."""
    helpers = {span.span_id for span in calls if _is_helper(span)}
    placed = Counter(segment.span_id for row in episode.rows for segment in row.segments)
    for one in episode.transitions:
        if one.span_id in helpers:
            if placed[one.span_id]:
                return f"the helper call {one.span_id} is in a row"
        elif one.reject:
            if one.reject not in _CAUSES:
                return f"a call reached no row: {one.reject}, {one.detail}"
        elif placed[one.span_id] != 1:
            return f"call {one.span_id} is in {placed[one.span_id]} rows"
    sampled = sum(len(one.response_ids) // 4 for one in episode.transitions if not one.reject)
    trained = sum(sum(row.mask) for row in episode.rows)
    return "" if sampled == trained else f"{sampled} tokens were sampled, and {trained} are trained"


def _shown(scenario: str, brain: Brain, ended: Sequence[Ended], folder: Path, calls: Sequence[Span]) -> str:
    """Return why a harness did not do what the scenario is about; ``""`` if it did."""
    if any(one.status == -1 for one in ended):
        return "it did not end within the time limit"
    if not brain.main:
        return f"it made no model call and ended with status {ended[0].status}"
    made = len(list((folder / "work").glob("made-*.txt")))
    asked = [str(span.call.request) for span in calls if span.call is not None]
    is_cut = any(span.call is not None and not span.call.is_complete for span in calls)
    ending = f"it ended with status {ended[0].status}"
    faults = {
        "one turn": ending if ended[0].status else "",
        "tool": "" if made == 1 else "its tool made no file",
        "parallel tools": "" if made == len(_PARALLEL) else f"{made} of {len(_PARALLEL)} files were made",
        "sub-agent": "" if brain.subagents else "it asked no sub-agent",
        "compaction": _compaction(brain, asked),
        "429 and retry": "" if brain.main > 1 else f"it did not try again: {ending}",
        "stream cut": "" if is_cut else "the record has no cut call",
        "resume": "" if asked and ANSWER in asked[-1] else "the second run does not know the first",
    }
    return faults[scenario]


def _compaction(brain: Brain, asked: Sequence[str]) -> str:
    if not brain.compactions:
        return "it asked for no summary"
    return "" if any(SUMMARY in text for text in asked) else "no later call knows the summary"
