"""What both stores do beyond the conformance suite: sharing of prompts, cancellation, threads, unusual input."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import Metric, RolloutQuery, Store
from agl.errors import ConflictError, FencedError, NotFoundError, StoreError
from agl.schemas import (
    LLM,
    ErrorInfo,
    ModelCall,
    Outcome,
    PromptTemplate,
    ResourceVersion,
    RetryPolicy,
    Rollout,
    Span,
    pack_ids,
)
from agl.stores import MemoryStore
from agl.urls import shown_url
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import eventually

Opener = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    if request.param == "memory":
        return MemoryStore
    return lambda: SQLiteStore(f"sqlite:///{tmp_path}/deep/er/runs.db")


@asynccontextmanager
async def opened(opener: Opener) -> AsyncIterator[Store]:
    store = opener()
    try:
        yield store
    finally:
        await store.close()


def run(opener: Opener, body: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened(opener) as store:
            await body(store)

    asyncio.run(main())


def rollouts(*ids: str, **fields: Any) -> list[Rollout]:
    return [Rollout(rollout_id=each, task={"q": each}, **fields) for each in ids]


def span(number: int, *, rollout: str = "a", attempt: str = "a.1", **fields: Any) -> Span:
    return Span(rollout_id=rollout, attempt_id=attempt, span_id=f"{number:016x}", name="step", **fields)


async def start(store: Store, *ids: str, **fields: Any) -> None:
    await store.enqueue(rollouts(*ids, **fields))
    await store.claim(worker="w", limit=len(ids))


def test_rollout_goes_from_the_queue_to_its_outcome(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await store.enqueue(rollouts("b", "a"))
        (claim,) = await store.claim(worker="w")
        assert ("b", "b.1", "running") == (claim.rollout.rollout_id, claim.attempt.attempt_id, claim.rollout.status)
        spans = (span(1, rollout="b", attempt="b.1"), span(2, rollout="b", attempt="b.1"))
        (after,) = await store.finish([Outcome(attempt_id="b.1", status="succeeded", spans=spans)])
        assert ("succeeded", 1, "b.1") == (after.status, after.attempts, after.attempt_id)
        assert [1, 2] == [each.sequence for each in await store.spans("b")]
        assert ["a"] == [each.rollout_id for each in await store.rollouts(RolloutQuery(status=("queued",)))]
        assert ["b"] == [each.rollout_id for each in await store.rollouts(RolloutQuery(status=("succeeded",)))]

    run(opener, body)


def test_outcome_is_fenced_and_repeatable(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await start(store, "a")
        done = Outcome(attempt_id="a.1", status="failed", error=ErrorInfo(type="E", message="m"))
        first = await store.finish([done])
        assert first == await store.finish([done])
        with pytest.raises(FencedError, match=r"a\.1"):
            await store.finish([Outcome(attempt_id="a.1", status="succeeded", spans=(span(9),))])
        assert [] == await store.spans("a")
        await store.append_spans([span(5)])
        assert [True] == [each.is_late for each in await store.spans("a")]

    run(opener, body)


def test_lapsed_lease_is_retried_then_failed_while_somebody_waits(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await store.enqueue(rollouts("a", retry=RetryPolicy(max_losses=1)))
        await store.claim(worker="w", lease_s=0.15)
        begin = time.monotonic()
        (again,) = await store.claim(worker="v", wait_s=60.0, lease_s=0.15)
        assert "a.2" == again.attempt.attempt_id
        assert 0.05 < time.monotonic() - begin < 20.0
        cursor = await store.cursor()
        changes = await store.changes(after=cursor, wait_s=60.0)
        assert ["failed"] == [change.status for change in changes]
        assert ["lost", "lost"] == [attempt.status for attempt in await store.attempts("a")]

    run(opener, body)


async def is_refused(store: Store, attempt_id: str) -> bool:
    return not await store.renew([attempt_id], lease_s=60)


def test_time_limit_holds_although_the_lease_is_renewed(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await store.enqueue(rollouts("a", retry=RetryPolicy(timeout_s=0.1)))
        await store.claim(worker="w", lease_s=60)
        assert ["a.1"] == await store.renew(["a.1"], lease_s=60)
        await eventually(partial(is_refused, store, "a.1"))
        (rollout,) = await store.rollouts(RolloutQuery(ids=("a",)))
        (attempt,) = await store.attempts("a")
        assert ("failed", "timeout") == (rollout.status, attempt.status)
        assert attempt.error is not None
        assert "timeout_s" in attempt.error.message

    run(opener, body)


def test_waiting_claim_wakes_at_once(opener: Opener) -> None:
    async def body(store: Store) -> None:
        waiting = asyncio.create_task(store.claim(worker="w", wait_s=60.0))
        await asyncio.sleep(0.1)  # so that it waits, and does not find the rollout when it looks first
        begin = time.monotonic()
        await store.enqueue(rollouts("a"))
        assert 1 == len(await waiting)
        assert time.monotonic() - begin < 30.0  # and not when its 60 s are over

    run(opener, body)


def test_cancelled_claims_lose_no_rollout(opener: Opener) -> None:
    async def body(store: Store) -> None:
        for number in range(60):
            await store.enqueue(rollouts(f"r{number:02d}"))
            task = asyncio.create_task(store.claim(worker="w", wait_s=1.0, lease_s=1000))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            if number % 3 == 0:
                await asyncio.sleep(0.0001 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            got = [] if task.cancelled() else [claim.rollout.rollout_id for claim in task.result()]
            if not got:
                (claim,) = await store.claim(worker="v", wait_s=2.0, lease_s=1000)
                assert (f"r{number:02d}", 1) == (claim.rollout.rollout_id, claim.attempt.number)

    run(opener, body)


def test_claim_id_gives_the_same_attempts_again(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await store.enqueue(rollouts("a", "b", "c"))
        first = await store.claim(worker="w", limit=2, claim_id="k")
        assert first == await store.claim(worker="w", limit=2, claim_id="k")
        assert ["c"] == [each.rollout.rollout_id for each in await store.claim(worker="w", limit=2, claim_id="l")]

    run(opener, body)


def test_claims_are_oldest_first_over_experiments(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await store.enqueue(rollouts("z", experiment="two") + rollouts("y", experiment="one") + rollouts("x"))
        assert ["y"] == [each.rollout.rollout_id for each in await store.claim(worker="w", experiment="one")]
        assert ["z", "x"] == [each.rollout.rollout_id for each in await store.claim(worker="w", limit=9)]

    run(opener, body)


def test_spans_keep_their_order_and_ignore_repetition(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await start(store, "a")
        await store.append_spans([span(3), span(1), span(3), span(2)])
        await store.append_spans([span(1), span(7, sequence=40), span(8)])
        found = await store.spans("a")
        assert [3, 1, 2, 7, 8] == [int(each.span_id, 16) for each in found]
        assert [1, 2, 3, 40, 41] == [each.sequence for each in found]
        assert [2, 3] == [each.sequence for each in await store.spans("a", after=1, limit=2)]
        late = span(4, attempt="")
        await store.append_spans([late])
        assert ["0000000000000004"] == [each.span_id for each in await store.spans("a", attempt_id="")]

    run(opener, body)


def conversation(turns: int, *, rollout: str = "a") -> list[Span]:
    ids, messages, spans = list(range(50)), [{"role": "user", "content": "hello there " * 20}], []
    for turn in range(turns):
        answer = {"role": "assistant", "content": f"answer {turn} " * 15}
        call = ModelCall(
            request_id=f"q{turn}",
            dialect="chat",
            model="m",
            request={"messages": list(messages), "model": "m"},
            response={"choices": [{"message": answer}]},
            prompt_ids=pack_ids(ids),
            response_ids=pack_ids(range(1000 * turn, 1000 * turn + 30)),
            logprobs=b"\x01" * 120,
        )
        spans.append(span(turn + 1, rollout=rollout, attempt=f"{rollout}.1", call=call))
        ids += [*range(1000 * turn, 1000 * turn + 30), 7, 8, 9]
        messages += [answer, {"role": "user", "content": f"go on {turn}"}]
    return spans


@pytest.mark.parametrize("turns", [1, 150])
def test_calls_come_back_as_they_were(opener: Opener, turns: int) -> None:
    async def body(store: Store) -> None:
        await start(store, "a")
        spans = conversation(turns)
        for each in spans:
            await store.append_spans([each])
        found = await store.spans("a")
        assert [each.call for each in spans] == [each.call for each in found]
        (last,) = await store.spans("a", after=turns - 1, limit=1)
        assert spans[-1].call == last.call

    run(opener, body)


def test_repeated_calls_do_not_mislead_later_ones(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await start(store, "a")
        spans = conversation(6)
        for end in range(1, 7):
            await store.append_spans(spans[:end])
            await store.append_spans(spans[:end])
        assert [each.call for each in spans] == [each.call for each in await store.spans("a")]

    run(opener, body)


def test_span_that_cannot_be_stored_leaves_no_trace(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await start(store, "a")
        spans = conversation(3)
        await store.append_spans(spans[:1])
        with pytest.raises(StoreError, match="step"):
            await store.append_spans([spans[1], span(99, attributes={"bad": object()})])
        outcome = Outcome(attempt_id="a.1", status="succeeded", spans=(spans[1], span(98, attributes={"x": 2**80})))
        with pytest.raises(StoreError):
            await store.finish([outcome])
        await store.append_spans(spans[2:])
        found = await store.spans("a")
        assert [spans[0].call, spans[2].call] == [each.call for each in found]
        assert not any(each.is_late for each in found)

    run(opener, body)


def test_wrong_input_names_the_culprit(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await start(store, "a")
        with pytest.raises(ConflictError, match="'a'"):
            await store.enqueue([Rollout(rollout_id="a", task="other")])
        with pytest.raises(StoreError, match="JSON"):
            await store.enqueue([Rollout(rollout_id="n", task=object())])
        with pytest.raises(StoreError, match="16383"):
            await store.enqueue(rollouts("n", retry=RetryPolicy(max_attempts=20_000)))
        with pytest.raises(ConflictError, match="status 'queued'"):
            await store.enqueue(rollouts("n", status="succeeded"))
        with pytest.raises(NotFoundError, match="nope"):
            await store.append_spans([span(1, rollout="nope", attempt="nope.1")])
        with pytest.raises(NotFoundError, match=r"a\.01"):
            await store.append_spans([span(1, attempt="a.01")])
        with pytest.raises(ConflictError, match="rollout_id"):
            await store.append_spans([span(1, rollout="b")])
        with pytest.raises(NotFoundError, match=r"a\.2"):
            await store.spans("a", attempt_id="a.2")
        with pytest.raises(ConflictError, match="running"):
            await store.finish([Outcome(attempt_id="a.1", status="running")])
        with pytest.raises(NotFoundError, match="main@7"):
            await store.resource("main", "7")
        assert [] == await store.rollouts(RolloutQuery(status=("queued",)))

    run(opener, body)


def test_resources_keep_lineage_and_no_secret(opener: Opener) -> None:
    async def body(store: Store) -> None:
        def version(name: str, number: int) -> ResourceVersion:
            return ResourceVersion(name=name, version=str(number), resource=PromptTemplate(template=f"v{number}"))

        await store.publish([version("p", 1), version("q", 1)])
        await store.publish([version("p", 2)])
        await store.publish([version("p", 1)])
        assert version("p", 2) == await store.resource("p")
        assert [version("p", 2), version("q", 1)] == await store.resources()
        assert [version("p", 1), version("p", 2)] == await store.resources("p")
        other = ResourceVersion(name="p", version="2", resource=PromptTemplate(template="other"))
        with pytest.raises(ConflictError, match="p@2"):
            await store.publish([version("p", 3), other])
        assert version("p", 2) == await store.resource("p")
        with pytest.raises(ConflictError, match="api_key_env"):
            await store.publish([ResourceVersion(name="l", version="1", resource=LLM(api_key="sk-secret"))])

    run(opener, body)


def test_states_and_metrics_are_replaced_and_sorted(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await store.save_state({"x/b": b"1", "x/a": b"2", "y": b"3"})
        await store.save_state({"x/b": b"", "x/c": b"4"})
        assert [("x/a", b"2"), ("x/c", b"4")] == list((await store.load_state("x/")).items())
        logged = [Metric(experiment="e", algorithm="g", step=s, name=n, value=s) for s in (2, 1) for n in "ba"]
        await store.log_metrics(logged)
        await store.log_metrics([Metric(experiment="e", algorithm="g", step=1, name="a", value=9)])
        assert [(1, "a", 9), (1, "b", 1), (2, "a", 2), (2, "b", 2)] == [
            (metric.step, metric.name, metric.value) for metric in await store.metrics("e")
        ]
        assert [1, 2] == [metric.step for metric in await store.metrics("e", name="b")]

    run(opener, body)


@pytest.mark.parametrize("unknown", [[], ["none.1"]])
def test_outcomes_that_come_together_are_answered_one_by_one(opener: Opener, unknown: list[str]) -> None:
    async def body(store: Store) -> None:
        await start(store, "a", "b", "c")
        batches = [["a.1"], ["b.1", "c.1"], unknown]
        outcomes = [[Outcome(attempt_id=each, status="succeeded") for each in batch] for batch in batches]
        *answers, last = await asyncio.gather(*map(store.finish, outcomes), return_exceptions=True)
        assert [["a"], ["b", "c"]] == [[rollout.rollout_id for rollout in answer] for answer in answers]
        assert isinstance(last, NotFoundError) if unknown else last == []
        assert ["succeeded"] * 3 == [rollout.status for rollout in await store.rollouts(RolloutQuery())]

    run(opener, body)


@pytest.mark.parametrize("other", ["b", "none"])
def test_spans_that_come_together_are_stored_or_refused_one_by_one(opener: Opener, other: str) -> None:
    async def body(store: Store) -> None:
        await start(store, "a", "b")
        batches = [conversation(3), conversation(2), conversation(1, rollout=other)]
        *answers, last = await asyncio.gather(*map(store.append_spans, batches), return_exceptions=True)
        assert [None, None] == answers
        assert isinstance(last, NotFoundError) if other == "none" else last is None
        assert [1, 2, 3] == [span.sequence for span in await store.spans("a")]
        tallies = [(await store.attempts(rollout_id))[0].tally.calls for rollout_id in "ab"]
        assert [3, int(other == "b")] == tallies

    run(opener, body)


def test_delete_takes_what_is_finished_only(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await start(store, "a", "b")
        await store.append_spans(conversation(3))
        await store.finish([Outcome(attempt_id="a.1", status="succeeded")])
        with pytest.raises(ConflictError, match="'b'"):
            await store.delete(["a", "b"])
        cursor = await store.cursor()
        assert 1 == await store.delete(["a"])
        with pytest.raises(NotFoundError):
            await store.spans("a")
        assert {"b"} == {change.key for change in await store.changes()}
        await store.enqueue(rollouts("a"))
        assert [cursor + 1] == [change.cursor for change in await store.changes(after=cursor)]
        assert [] == await store.attempts("a")

    run(opener, body)


def test_deleted_rollout_leaves_nothing_to_the_next_of_its_id(opener: Opener) -> None:
    async def body(store: Store) -> None:
        spans = conversation(4)
        await start(store, "a")
        await store.finish([Outcome(attempt_id="a.1", status="succeeded")])
        await store.append_spans(spans)
        await store.delete(["a"])
        await start(store, "a")
        await store.append_spans(spans[1:])
        assert [each.call for each in spans[1:]] == [each.call for each in await store.spans("a")]

    run(opener, body)


def test_cancel_stops_queued_and_running(opener: Opener) -> None:
    async def body(store: Store) -> None:
        await start(store, "a")
        await store.enqueue(rollouts("b"))
        assert ["cancelled", "cancelled"] == [each.status for each in await store.cancel(["a", "b"])]
        assert [] == await store.renew(["a.1"])
        with pytest.raises(FencedError):
            await store.finish([Outcome(attempt_id="a.1", status="succeeded")])
        assert [] == await store.claim(worker="w")

    run(opener, body)


def test_close_ends_who_waits(opener: Opener) -> None:
    async def body(store: Store) -> None:
        waiting = [
            asyncio.create_task(store.claim(worker="w", wait_s=30)),
            asyncio.create_task(store.changes(wait_s=30)),
        ]
        await asyncio.sleep(0.1)
        await store.close()
        await store.close()
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
        assert [StoreError, StoreError] == [type(each) for each in results]
        with pytest.raises(StoreError, match="closed"):
            await store.cursor()

    run(opener, body)


def test_one_object_serves_many_threads_and_loops(opener: Opener) -> None:
    store = opener()
    claimed: list[str] = []

    def work(number: int) -> None:
        async def main() -> None:
            await store.enqueue(rollouts(*(f"r{number}-{at}" for at in range(20))))
            while claims := await store.claim(worker=str(number), limit=3, wait_s=0.3):
                claimed.extend(claim.rollout.rollout_id for claim in claims)
                await store.finish([Outcome(attempt_id=c.attempt.attempt_id, status="succeeded") for c in claims])

        asyncio.run(main())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 80 == len(claimed) == len(set(claimed))
    asyncio.run(store.close())


def test_pages_follow_each_other(opener: Opener) -> None:
    async def body(store: Store) -> None:
        ids = [f"r{at:02d}" for at in range(20)]
        for at, each in enumerate(ids):
            await store.enqueue(
                rollouts(
                    each, experiment="xy"[at % 2], mode="val" if at % 3 else "train", group_id="g" if at > 9 else ""
                )
            )
        first = await store.rollouts(RolloutQuery(limit=12))
        rest = await store.rollouts(RolloutQuery(limit=12, after=first[-1].rollout_id))
        assert ids == [each.rollout_id for each in first + rest]
        newest = await store.rollouts(RolloutQuery(is_newest_first=True, after="r05", limit=3, mode="val"))
        assert ["r04", "r02", "r01"] == [each.rollout_id for each in newest]
        some = await store.rollouts(RolloutQuery(experiment="y", group_id="g", status=("queued", "failed"), limit=2))
        assert ["r11", "r13"] == [each.rollout_id for each in some]
        assert 10 == len(await store.rollouts(RolloutQuery(group_id="")))
        with pytest.raises(NotFoundError, match="zz"):
            await store.rollouts(RolloutQuery(ids=("r01", "zz")))

    run(opener, body)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///runs/a@b.db", "sqlite:///runs/a@b.db"),
        ("memory://", "memory://"),
        ("http://:token@host:4747", "http://host:4747"),
        ("postgresql://me:p@ss@host:5432/runs?sslmode=require", "postgresql://host:5432/runs?sslmode=require"),
        (
            "postgres://host/runs?password=secret&sslpassword=x&schema=a",
            "postgres://host/runs?password=***&sslpassword=***&schema=a",
        ),
    ],
)
def test_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert shown == shown_url(url)


@pytest.mark.parametrize("limit", [-1, 2**63])
def test_pages_that_no_store_can_count_to_are_refused(opener: Opener, limit: int) -> None:
    async def body(store: Store) -> None:
        for asked in (
            store.rollouts(RolloutQuery(limit=limit)),
            store.recordings(RolloutQuery(limit=limit)),
            store.spans("r", limit=limit),
            store.claim(worker="w", limit=limit),
            store.changes(limit=limit),
        ):
            with pytest.raises(StoreError, match=f"limit = {limit}; choose between 0 and"):
                await asked
        with pytest.raises(StoreError, match=f"after = {limit}; choose between 0 and"):
            await store.changes(after=limit)

    run(opener, body)


def test_lease_in_memory_lapses_in_time_though_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    system, back_s = time.time, [0.0]
    monkeypatch.setattr("time.time", lambda: system() - back_s[0])

    async def body(store: Store) -> None:
        await store.enqueue(rollouts("ro"))
        assert await store.claim(worker="dies", lease_s=0.2)
        back_s[0] = 86400.0
        (claim,) = await store.claim(worker="w", wait_s=10)
        assert 2 == claim.attempt.number

    run(MemoryStore, body)
