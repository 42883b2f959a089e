"""Tests that data survives a restart, ``kill -9``, several processes on one store, an upgrade, and damaged records."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from agl.contracts import ExperimentRecord, LabelMove, Metric, Presence, RolloutQuery, Store, Trained, VersionScore
from agl.errors import ConflictError, FencedError, NotFoundError, SchemaVersionError, StoreError
from agl.schemas import PromptTemplate, ResourceVersion, Rollout, encode
from agl_testing.conformance._base import require, run
from agl_testing.conformance.store.case import opened
from agl_testing.conformance.store.leases import SHORT_S
from agl_testing.stores.process import Acknowledged, StoreLocation
from agl_testing.stores.samples import (
    VICTIM,
    finish_one,
    make_call,
    make_reward_span,
    make_rollout,
    make_span,
    outcome_of,
    start_one,
)
from agl_testing.waiting import wait_until

KILLS = 12
"""Number of kills in the kill test; each takes about half a second."""

UNREADABLE = (b"garbage", encode({"rollout_id": 7, "attempt_id": 7}))
"""Records that cannot be read: bytes that encode nothing, and values of a wrong type."""


class DurabilityTests:
    """Tests that open one location several times."""

    is_durable: ClassVar[bool] = True
    """True if acknowledged writes survive the end of the process."""

    is_shared: ClassVar[bool] = True
    """True if several processes may have the location open at once."""

    has_schema_version: ClassVar[bool] = True
    """True if the location stores a schema version; requires :meth:`set_schema_version`."""

    has_older_schema: ClassVar[bool] = True
    """True if an older release wrote a different schema; requires :meth:`make_older`."""

    can_be_damaged: ClassVar[bool] = True
    """True if a record at the location can be overwritten from outside; requires :meth:`damage`."""

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        """Set the schema version in the data at ``location`` to ``version``."""
        raise NotImplementedError(f"write set_schema_version for {location.factory}, or lower has_schema_version")

    def make_older(self, location: StoreLocation) -> None:
        """Convert the data at ``location`` to the schema of an older release."""
        raise NotImplementedError(
            f"write make_older for {location.factory}, or lower has_older_schema if no release had another schema"
        )

    def damage(self, location: StoreLocation, rollout_id: str, number: int, data: bytes) -> None:
        """Overwrite the record of the rollout's attempt ``number`` with ``data``; 0 stands for the rollout itself."""
        raise NotImplementedError(f"write damage for {location.factory}, or lower can_be_damaged")

    def test_reopened_store_has_everything(self, location: StoreLocation) -> None:
        require(self.is_durable, "is_durable", "store")

        assert run(_fill(location)) == run(_read(location))

    def test_acknowledged_writes_survive_kill_9(self, location: StoreLocation, tmp_path: Path) -> None:
        require(self.is_durable, "is_durable", "store")
        draw = random.Random(11)
        for number in range(KILLS):
            report = tmp_path / f"report-{number}"
            _run_victim(location, report, kill_after_s=draw.uniform(0.05, 0.6))
            acknowledged = _read_report(report)
            assert acknowledged
            assert [] == run(_lost(location, acknowledged))

    def test_attempt_of_a_killed_worker_is_claimed_again(self, location: StoreLocation, tmp_path: Path) -> None:
        require(self.is_durable, "is_durable", "store")
        report = tmp_path / "report"
        _run_victim(location, report, kill_after_s=0.3)

        async def reclaim() -> None:
            async with opened(location) as store:
                query = RolloutQuery(status=("queued", "running"), limit=100_000)
                unfinished = {rollout.rollout_id for rollout in await store.rollouts(query)}
                while unfinished:
                    claims = await store.claim(worker="next", limit=100, wait_s=10)
                    assert claims
                    await store.finish([outcome_of(claim) for claim in claims])
                    unfinished -= {claim.rollout.rollout_id for claim in claims}
                assert [] == await store.rollouts(RolloutQuery(status=("queued", "running", "failed")))

        run(reclaim())

    def test_two_objects_on_one_location_wake_each_other(self, location: StoreLocation) -> None:
        require(self.is_shared, "is_shared", "store")

        async def body() -> None:
            async with opened(location) as one, opened(location) as two:
                waiting = asyncio.create_task(two.claim(worker="w", wait_s=20))
                await asyncio.sleep(0.1)
                rollout = (await one.enqueue([make_rollout()]))[0]
                started = time.monotonic()
                claims = await waiting
                assert [rollout.rollout_id] == [c.rollout.rollout_id for c in claims]
                assert time.monotonic() - started < 3
                await two.finish([outcome_of(claims[0])])
                assert "succeeded" == (await one.rollouts(RolloutQuery()))[0].status

        run(body())

    def test_several_processes_share_the_work_without_overlap(self, location: StoreLocation, tmp_path: Path) -> None:
        require(self.is_shared, "is_shared", "store")

        async def enqueue() -> set[str]:
            async with opened(location) as store:
                return {rollout.rollout_id for rollout in await store.enqueue([make_rollout() for _ in range(200)])}

        asked = run(enqueue())
        reports = [tmp_path / f"worker-{number}" for number in range(3)]
        workers = [_start_victim(location, report, "drain") for report in reports]
        assert [0, 0, 0] == [worker.wait(60) for worker in workers]
        taken = [line.key for report in reports for line in _read_report(report)]
        assert sorted(asked) == sorted(taken)

    def test_of_objects_that_take_one_lease_at_once_one_succeeds(self, location: StoreLocation) -> None:
        require(self.is_shared, "is_shared", "store")

        async def body() -> None:
            stores = [location.open() for _ in range(3)]
            asked = [Presence(experiment="e", session=f"{number}") for number in range(12)]
            taking = [stores[at % 3].announce(presence, replaces="") for at, presence in enumerate(asked)]
            ended = await asyncio.gather(*taking, return_exceptions=True)
            (winner,) = [presence.session for presence, error in zip(asked, ended, strict=True) if error is None]
            assert [winner] == [presence.session for presence in await stores[0].presences("e")]
            assert {FencedError} == {type(error) for error in ended if error is not None}
            for store in stores:
                await store.close()

        run(body())

    def test_objects_that_move_one_label_at_once_leave_one_history(self, location: StoreLocation) -> None:
        require(self.is_shared, "is_shared", "store")

        async def body() -> None:
            stores = [location.open() for _ in range(3)]
            versions = [f"v{number}" for number in range(12)]
            await stores[0].publish(
                [ResourceVersion(name="p", version=v, resource=PromptTemplate(template=v)) for v in versions]
            )
            moves = [LabelMove(name="p", label="production", version=version) for version in versions]
            made = await asyncio.gather(*(stores[at % 3].move_label(move) for at, move in enumerate(moves)))
            history = await stores[1].label_moves("p", "production")
            assert sorted(versions) == sorted(move.version for move in history)
            times = [move.moved_at for move in history]
            assert sorted(set(times)) == times
            assert sorted(made, key=lambda move: move.moved_at) == history
            assert [history[-1]] == await stores[2].labels("p")
            for store in stores:
                await store.close()

        run(body())

    def test_closed_store_refuses_work(self, location: StoreLocation) -> None:
        async def body() -> None:
            store = location.open()
            await store.close()
            await store.close()
            with pytest.raises(StoreError):
                await store.enqueue([make_rollout()])

        run(body())

    def test_data_of_a_newer_schema_is_refused(self, location: StoreLocation) -> None:
        require(self.has_schema_version, "has_schema_version", "store")

        async def use() -> None:
            async with opened(location) as store:
                await store.enqueue([make_rollout()])

        run(use())
        self.set_schema_version(location, 999)
        with pytest.raises(SchemaVersionError, match="999"):
            run(use())

    def test_data_of_an_older_schema_is_migrated_with_nothing_lost(self, location: StoreLocation) -> None:
        require(self.has_schema_version, "has_schema_version", "store")
        require(self.has_older_schema, "has_older_schema", "store")
        written = run(_fill(location))
        self.make_older(location)
        assert written == run(_read(location))

        async def go_on() -> None:
            async with opened(location) as store:
                assert "succeeded" == (await finish_one(store, spans=1)).status

        run(go_on())

    def test_damaged_rollouts_stop_no_work_and_can_be_removed(self, location: StoreLocation) -> None:
        require(self.can_be_damaged, "can_be_damaged", "store")

        async def body() -> None:
            async with opened(location) as store:
                await start_one(store, make_rollout(group_id="g"), lease_s=SHORT_S)
                await store.enqueue([make_rollout() for _ in range(4)])
                *damaged, whole = [rollout.rollout_id for rollout in await store.rollouts(RolloutQuery())]
                for rollout_id, data in zip(damaged, UNREADABLE * 2, strict=True):
                    self.damage(location, rollout_id, 0, data)
                    with pytest.raises(NotFoundError, match=rollout_id) as caught:
                        await store.cancel([rollout_id])
                    assert caught.value.is_damaged
                await asyncio.sleep(SHORT_S * 2)
                for experiment in ("", None):
                    claim = (await store.claim(worker="w", experiment=experiment))[0]
                    assert whole == claim.rollout.rollout_id
                    await store.finish([outcome_of(claim, "lost")])
                assert [whole] == [rollout.rollout_id for rollout in await store.rollouts(RolloutQuery())]
                assert 4 == await store.delete(damaged)
                for query in (RolloutQuery(), RolloutQuery(status=("queued", "running"))):
                    assert 1 == await store.count_rollouts(query)
                assert [] == await store.rollouts(RolloutQuery(group_id="g"))
                assert "queued" == (await store.enqueue([Rollout(rollout_id=damaged[0], task=1)]))[0].status

        run(body())

    def test_damaged_rollout_that_runs_is_not_removed(self, location: StoreLocation) -> None:
        require(self.can_be_damaged, "can_be_damaged", "store")

        async def body() -> None:
            async with opened(location) as store:
                claim, ended = await start_one(store), await start_one(store)
                await store.finish([outcome_of(ended)])
                for each in (claim, ended):
                    self.damage(location, each.rollout.rollout_id, 0, UNREADABLE[0])
                ids = [claim.rollout.rollout_id, ended.rollout.rollout_id]
                with pytest.raises(ConflictError, match=ids[0]):
                    await store.delete([ids[1], ids[0]])
                assert 1 == await store.delete([ids[1]])

        run(body())

    def test_attempt_with_a_damaged_record_is_renewed_and_decided(self, location: StoreLocation) -> None:
        require(self.can_be_damaged, "can_be_damaged", "store")

        async def body() -> None:
            async with opened(location) as store:
                lapsing = [await start_one(store, lease_s=SHORT_S) for _ in UNREADABLE]
                claims = [await start_one(store) for _ in UNREADABLE]
                for claim, data in zip([*lapsing, *claims], UNREADABLE * 2, strict=True):
                    self.damage(location, claim.rollout.rollout_id, 1, data)
                ids = [claim.attempt.attempt_id for claim in claims]
                assert ids == await store.renew(ids)
                await store.append_spans([make_span(claim) for claim in claims])
                await store.cancel([claims[0].rollout.rollout_id])
                assert "succeeded" == (await store.finish([outcome_of(claims[1])]))[0].status
                await asyncio.sleep(SHORT_S * 2)
                again = [claim.rollout.rollout_id for claim in await store.claim(worker="w", limit=9)]
                assert [claim.rollout.rollout_id for claim in lapsing] == again

        run(body())


async def _fill(location: StoreLocation) -> list[object]:
    """Write records of every kind, and return the contents of the store."""
    store = location.open()
    await finish_one(store, spans=2)
    ended = await start_one(store)
    graded = make_reward_span(ended.rollout.rollout_id, ended.attempt.attempt_id, 0.5)
    await store.finish([outcome_of(ended, spans=[make_span(ended, call=make_call(range(9), range(4))), graded])])
    await store.append_spans([make_reward_span(ended.rollout.rollout_id, ended.attempt.attempt_id, 0.75)])
    claim = await start_one(store, make_rollout(experiment="e"))
    await store.append_spans([make_span(claim)])
    versions = [
        ResourceVersion(name="prompt", version=version, resource=PromptTemplate(template=version))
        for version in ("v1", "v2")
    ]
    await store.publish(versions)
    for version in ("v1", "v2"):
        await store.move_label(LabelMove(name="prompt", label="production", version=version, reason="why"))
    score = VersionScore(name="prompt", version="v1", mean=0.5, low=0.25, high=0.75, n=8, how="fresh")
    await store.save_scores([score])
    await store.save_state(
        {"experiment/e/2/algorithm/a": b"v"},
        experiment=ExperimentRecord(name="e", run=2, live={"prompt": "v2"}, turn=3),
        trained=[
            Trained(experiment="e", run=2, algorithm="a", step=step, rollout_ids=(f"r{step}",)) for step in (1, 2)
        ],
    )
    await store.log_metrics([Metric(experiment="e", run=2, algorithm="a", step=1, name="loss", value=0.5)])
    seen = await _contents(store)
    await store.close()
    return seen


async def _read(location: StoreLocation) -> list[object]:
    async with opened(location) as store:
        return await _contents(store)


async def _contents(store: Store) -> list[object]:
    rollouts = await store.rollouts(RolloutQuery())
    ids = [rollout.rollout_id for rollout in rollouts]
    attempts = [await store.attempts(rollout_id) for rollout_id in ids]
    spans = [await store.spans(rollout_id) for rollout_id in ids]
    rest = [
        await store.changes(),
        await store.resources("prompt"),
        await store.load_state(""),
        await store.experiments(),
        await store.trained("e", run=2, algorithm="a"),
        [msgspec.structs.replace(move, moved_at=round(move.moved_at, 3)) for move in await store.labels()],
        [move.version for move in await store.label_moves("prompt", "production")],
        await store.scores("prompt"),
        await store.metrics("e"),
        await store.statistics(),
    ]
    return [rollouts, attempts, spans, rest]


async def _saved(store: Store) -> set[str]:
    return {key.removeprefix("victim/") for key in await store.load_state("victim/")}


async def _lost(location: StoreLocation, acknowledged: list[Acknowledged]) -> list[Acknowledged]:
    store = location.open()
    lost: list[Acknowledged] = []
    # A server may still carry out writes of a killed client, so states are read both before and after the ledger.
    before = await _saved(store)
    ledger = await store.trained(VICTIM, run=1, algorithm="a")
    after = await _saved(store)
    assert before <= ledger.keys() <= after, "a state and its ledger are written together or not at all"
    for item in acknowledged:
        try:
            rollout = (await store.rollouts(RolloutQuery(ids=(item.key,))))[0]
            attempts = await store.attempts(item.key)
            spans = [s for a in attempts for s in await store.spans(item.key, attempt_id=a.attempt_id)]
        except NotFoundError:
            lost.append(item)
            continue
        is_kept = {
            "enqueued": True,
            "claimed": bool(attempts),
            "appended": any(span.name == "appended" for span in spans),
            "finished": rollout.status == "succeeded" and any(span.name == "final" for span in spans),
            "trained": item.key in ledger,
        }[item.kind]
        lost += [] if is_kept else [item]
    await store.close()
    return lost


def _run_victim(location: StoreLocation, report: Path, *, kill_after_s: float) -> None:
    victim = _start_victim(location, report, "write")
    wait_until(lambda: victim.poll() is not None or (report.exists() and report.stat().st_size))
    assert victim.poll() is None
    time.sleep(kill_after_s)
    victim.kill()
    victim.wait(30)


def _start_victim(location: StoreLocation, report: Path, mode: str) -> "subprocess.Popen[bytes]":
    arguments = [location.factory, location.url, str(report), mode]
    return subprocess.Popen([sys.executable, "-m", "agl_testing.stores.process", *arguments])


def _read_report(report: Path) -> list[Acknowledged]:
    whole = report.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=Acknowledged) for line in whole.splitlines()]
