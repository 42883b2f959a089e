"""A worker's token allows a worker's tasks in its experiment, and reaches nothing of other experiments."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import ExperimentRecord, LabelMove, Presence, RolloutQuery, SpanQuery
from agl.errors import AglError, FencedError, NotFoundError, TokenError
from agl.schemas import (
    Outcome,
    PromptTemplate,
    ResourceVersion,
    Reward,
    Rollout,
    Span,
    new_span_id,
    new_trace_id,
)
from agl.stores import read_recordings
from agl_gateway.client import HttpStore
from agl_run import RunContext
from agl_run.access.tokens import AdminKey, AttemptTokens, IssuedClaim
from agl_run.agents.agent import AgentSpec
from agl_run.worker.remote_gateway import RemoteGateway
from agl_testing.waiting import eventually

from .conftest import SECRET, Stage, StageFactory

LONG_AGO = 3600.0


def span(attempt_id: str, *, reward: float | None = None) -> Span:
    """Return a span of the attempt, with a reward if one is given."""
    return Span(
        rollout_id=attempt_id.rpartition(".")[0],
        attempt_id=attempt_id,
        span_id=new_span_id(),
        trace_id=new_trace_id(),
        name="work",
        start_ns=1,
        reward=None if reward is None else Reward(value=reward),
    )


def rollout(name: str, experiment: str, version: str) -> Rollout:
    """Return a rollout whose task has a hidden field."""
    task = {"question": "?", "answer": f"the answer of {experiment}"}
    resources = {"prompt": version}
    return Rollout(rollout_id=name, task=task, hidden=("answer",), experiment=experiment, resources=resources)


@dataclass
class Two:
    """A store with two experiments, ``mine`` and ``other``, each with a running attempt and a queued rollout."""

    it: Stage
    worker: HttpStore
    """The store, opened with a worker's token for ``mine``."""


@asynccontextmanager
async def two(stage: StageFactory, monkeypatch: pytest.MonkeyPatch, **settings: int) -> AsyncIterator[Two]:
    async with stage(**settings) as it:
        for experiment in ("mine", "other"):
            version = ResourceVersion(
                name="prompt", version=f"{experiment}-1", resource=PromptTemplate(template=experiment)
            )
            await it.store.publish([version])
            await it.store.enqueue(
                [rollout(f"{experiment}-{number}", experiment, f"{experiment}-1") for number in (1, 2)]
            )
            await it.store.claim(worker="somebody", experiment=experiment, claim_id=f"claim of {experiment}")
            record = ExperimentRecord(name=experiment, live={"prompt": f"{experiment}-1"})
            await it.store.save_state({f"experiment/{experiment}/1/algorithm/apo": b"state"}, experiment=record)
            await it.store.announce(Presence(experiment=experiment, session="s"))
            await it.store.append_spans([span(f"{experiment}-1.1")])
        token = it.tokens.issue_for_worker("mine", expires_at=time.time() + 600)
        monkeypatch.setenv("AGL_WORKER_TOKEN", token)
        worker = HttpStore(it.url)
        try:
            yield Two(it=it, worker=worker)
        finally:
            await worker.close()


Call = Callable[[HttpStore], Awaitable[Any]]

FOREIGN: dict[str, Call] = {
    "claim": lambda s: s.claim(worker="w", experiment="other"),
    "claim of every experiment": lambda s: s.claim(worker="w"),
    "renew": lambda s: s.renew(["mine-1.1", "other-1.1"]),
    "finish": lambda s: s.finish([Outcome(attempt_id="other-1.1", status="succeeded")]),
    "finish with a span of another": lambda s: s.finish(
        [Outcome(attempt_id="mine-1.1", status="succeeded", spans=(span("other-1.1"),))]
    ),
    "append_spans": lambda s: s.append_spans([span("mine-1.1"), span("other-1.1")]),
    "append_spans beside an attempt": lambda s: s.append_spans(
        [Span(rollout_id="mine-1", attempt_id="", span_id="a" * 16, trace_id="b" * 32, name="x", start_ns=1)]
    ),
    "rollouts": lambda s: s.rollouts(RolloutQuery(experiment="other")),
    "rollouts of every experiment": lambda s: s.rollouts(RolloutQuery()),
    "rollouts by id": lambda s: s.rollouts(RolloutQuery(ids=("mine-1", "other-1"))),
    "rollouts by id in one's own": lambda s: s.rollouts(RolloutQuery(ids=("other-1",), experiment="mine")),
    "rollouts by id elsewhere": lambda s: s.rollouts(RolloutQuery(ids=("mine-1",), experiment="other")),
    "count_rollouts": lambda s: s.count_rollouts(RolloutQuery(contains="answer of other")),
    "recordings": lambda s: s.recordings(RolloutQuery(experiment="other")),
    "recordings by id": lambda s: s.recordings(RolloutQuery(ids=("other-1",))),
    "recordings with another's spans": lambda s: s.recordings(
        RolloutQuery(experiment="mine"), spans=SpanQuery(attempt_id="other-1.1")
    ),
    "attempts": lambda s: s.attempts("other-1"),
    "spans": lambda s: s.spans("other-1"),
    "spans of another's attempt": lambda s: s.spans("mine-1", attempt_id="other-1.1"),
    "resource": lambda s: s.resource("prompt", "other-1"),
    "resource, the newest": lambda s: s.resource("prompt"),
    "resources": lambda s: s.resources(),
    "labels": lambda s: s.labels(),
    "scores": lambda s: s.scores("prompt"),
    "experiments": lambda s: s.experiments("other"),
    "all experiments": lambda s: s.experiments(),
    "presences": lambda s: s.presences("other"),
    "announce": lambda s: s.announce(Presence(experiment="other", member="w", session="s")),
    "announce as the trainer": lambda s: s.announce(Presence(experiment="mine", session="s")),
    "withdraw": lambda s: s.withdraw("other", ["w"]),
    "withdraw the trainer": lambda s: s.withdraw("mine", ["w", ""]),
    "changes": lambda s: s.changes(),
    "cursor": lambda s: s.cursor(),
    "load_state": lambda s: s.load_state("experiment/mine/"),
    "save_state": lambda s: s.save_state({"experiment/mine/1/algorithm/apo": b""}),
    "statistics": lambda s: s.statistics("mine"),
    "trained": lambda s: s.trained("mine", run=1, algorithm="apo"),
    "metrics": lambda s: s.metrics("mine"),
    "log_metrics": lambda s: s.log_metrics([]),
    "enqueue": lambda s: s.enqueue([rollout("mine-3", "mine", "mine-1")]),
    "cancel": lambda s: s.cancel(["mine-1"]),
    "delete": lambda s: s.delete(["mine-1"]),
    "publish": lambda s: s.publish([]),
    "move_label": lambda s: s.move_label(LabelMove(name="prompt", label="production", version="mine-1")),
    "make a token": lambda s: s.make_worker_token("other", valid_s=60),
}
"""Calls that a worker's token for the experiment ``mine`` does not allow."""


async def snapshot(it: Stage) -> list[Any]:
    """Return everything that the calls could have changed."""
    store = it.store
    recordings = [one async for one in read_recordings(store, RolloutQuery(), spans="all")]
    presences = [await store.presences(name) for name in ("mine", "other")]
    return [recordings, presences, await store.load_state(""), await store.experiments(), await store.labels()]


async def test_nothing_of_another_experiment_is_read_claimed_or_written(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(stage, monkeypatch) as the:
        before = await snapshot(the.it)
        for what, call in FOREIGN.items():
            with pytest.raises((TokenError, NotFoundError), match="worker's token") as refused:
                await call(the.worker)
            assert "admin token" in str(refused.value) or "about the process" in str(refused.value), what
            assert "answer of other" not in str(refused.value)
        assert before == await snapshot(the.it)


async def test_unknown_ids_and_those_of_another_experiment_are_told_apart_by_nothing(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(call: Awaitable[object], name: str) -> str:
        with pytest.raises(NotFoundError) as refused:
            await call
        return str(refused.value).replace(name, "ID")

    async with two(stage, monkeypatch) as the:
        foreign = [
            await told(the.worker.spans("other-1"), "other-1"),
            await told(the.worker.renew(["other-1.1"]), "other-1"),
        ]
        unknown = [
            await told(the.worker.spans("none-1"), "none-1"),
            await told(the.worker.renew(["none-1.1"]), "none-1"),
        ]
        assert unknown == foreign
        foreign_version = await told(the.worker.resource("prompt", "other-1"), "other-1")
        assert await told(the.worker.resource("prompt", "none-1"), "none-1") == foreign_version


async def test_a_worker_does_its_work_in_its_own_experiment(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(stage, monkeypatch, max_spans=1) as the:
        worker = the.worker
        [claim] = await worker.claim(worker="w", experiment="mine")
        attempt_id = claim.attempt.attempt_id
        assert ("mine-2", "the answer of mine") == (claim.rollout.rollout_id, claim.rollout.task["answer"])
        assert [attempt_id] == await worker.renew([attempt_id])
        await worker.append_spans([span(attempt_id), span(attempt_id, reward=0.5)])
        assert 2 == len(await worker.spans("mine-2", attempt_id=attempt_id))
        assert "mine" == (await worker.resource("prompt", "mine-1")).resource.template  # type: ignore[union-attr]
        query = RolloutQuery(experiment="mine", status=("running",))
        found = [one.rollout.rollout_id async for one in read_recordings(worker, query)]
        assert ["mine-1", "mine-2"] == found
        assert 2 == await worker.count_rollouts(query)
        assert ["mine-2"] == [one.rollout_id for one in await worker.rollouts(RolloutQuery(ids=("mine-2",)))]
        assert ["mine"] == [record.name for record in await worker.experiments("mine")]
        await worker.announce(Presence(experiment="mine", member="w", session="s"))
        assert ["", "w"] == [one.member for one in await worker.presences("mine")]
        await worker.withdraw("mine", ["w"])
        outcome = Outcome(attempt_id=attempt_id, status="succeeded", spans=(span(attempt_id, reward=1.0),))
        assert ["succeeded"] == [one.status for one in await worker.finish([outcome])]
        assert ["succeeded"] == [one.status for one in await worker.finish([outcome])]  # its answer was lost


async def test_claims_bring_the_tokens_of_their_attempts_and_agents_call_with_them(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(_: Rollout) -> dict[str, Any]:
        return {}

    async with two(stage, monkeypatch) as the:
        [claim] = await the.worker.claim(worker="w", experiment="mine", claim_id="a lost answer")
        [again] = await the.worker.claim(worker="w", experiment="mine", claim_id="a lost answer")
        assert isinstance(claim, IssuedClaim)
        assert claim.attempt == again.attempt
        setup = RunContext(agent=AgentSpec(command=("true",)), store=the.worker, secret=None, resources=none)
        token = setup.token_of(claim)
        assert token not in repr(claim)
        async with the.it.openai(token) as client:
            await client.chat.completions.create(model="main_llm", messages=[{"role": "user", "content": "hi"}])
        assert 1 == len(await the.it.calls(claim.attempt.attempt_id))
        assert [] == await the.worker.claim(worker="w", experiment="mine", claim_id="claim of other")
        plain = (await the.it.store.claim(worker="w", experiment="other"))[0]
        with pytest.raises(TokenError, match="was claimed without its token"):
            setup.token_of(plain)


async def test_versions_pinned_by_a_running_rollout_are_read_and_others_of_the_name_are_not(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(stage, monkeypatch) as the:
        versions = [
            ResourceVersion(name="prompt", version=version, resource=PromptTemplate(template=version))
            for version in ("pinned", "loose")
        ]
        await the.it.store.publish(versions)
        await the.it.store.enqueue([rollout("mine-0", "mine", "pinned")])
        await the.it.store.claim(worker="w", experiment="mine", limit=5)  # at another gateway
        assert "pinned" == (await the.worker.resource("prompt", "pinned")).version
        with pytest.raises(NotFoundError, match="live there or pinned by a running rollout"):
            await the.worker.resource("prompt", "loose")


async def test_rewards_for_attempts_that_ended_need_the_admin_token(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(stage, monkeypatch) as the:
        await the.worker.finish([Outcome(attempt_id="mine-1.1", status="succeeded")])
        with pytest.raises(FencedError, match="has ended"):
            await the.worker.append_spans([span("mine-1.1", reward=1.0)])
        outcome = Outcome(attempt_id="mine-1.1", status="succeeded", spans=(span("mine-1.1", reward=1.0),))
        with pytest.raises(FencedError, match="has ended"):
            await the.worker.finish([outcome])
        await the.worker.append_spans([span("mine-1.1")])
        assert [None, None] == [one.reward for one in await the.it.store.spans("mine-1")]


async def test_a_worker_waits_for_the_calls_of_its_own_attempts_only(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(stage, monkeypatch) as the:
        token = the.it.tokens.issue_for_worker("mine", expires_at=time.time() + 600)
        remote = RemoteGateway(the.it.url, key=lambda: token, patience_s=0.0)
        assert "" == await remote.look()
        await remote.settle("mine-1.1")
        with pytest.raises(AglError, match="other-1"):
            await remote.settle("other-1.1")


async def test_a_rollout_that_was_made_again_elsewhere_is_not_reached_by_its_old_id(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(stage, monkeypatch) as the:
        await the.worker.finish([Outcome(attempt_id="mine-1.1", status="succeeded")])
        await the.it.store.delete(["mine-1"])
        await the.it.store.enqueue([rollout("mine-1", "other", "other-1")])

        async def is_gone() -> bool:
            try:
                await the.worker.attempts("mine-1")
            except NotFoundError:
                return True
            return False

        assert await eventually(is_gone)


async def test_a_workers_token_expires_and_its_file_is_read_again(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with stage() as it:
        file = tmp_path / "token"
        file.write_text(it.tokens.issue_for_worker("mine", expires_at=time.time() - LONG_AGO))
        file.chmod(0o600)
        monkeypatch.setenv("AGL_WORKER_TOKEN_FILE", str(file))
        worker = HttpStore(it.url)
        with pytest.raises(TokenError, match=r"AGL_WORKER_TOKEN .* expired .* agl worker-token mine"):
            await worker.experiments("mine")
        file.write_text(it.tokens.issue_for_worker("mine", expires_at=time.time() + LONG_AGO))
        assert [] == await worker.experiments("mine")
        await worker.close()


async def test_the_admin_token_has_a_worker_token_made_which_works(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage() as it:
        admin = HttpStore(it.url, token=AdminKey(SECRET)())
        token = await admin.make_worker_token("mine", valid_s=60, name="node-7")
        await admin.close()
        claim = AttemptTokens(SECRET).verify(token, now=time.time())
        assert ("worker", "mine", "node-7") == (claim.scope, claim.experiment, claim.name)
        assert 0 < claim.expires_at - time.time() <= 60
        monkeypatch.setenv("AGL_WORKER_TOKEN", token)
        worker = HttpStore(it.url)
        assert [] == await worker.presences("mine")
        await worker.close()
