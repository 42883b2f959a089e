"""Versions that were never saved are marked as such, and unfinished rollouts that are pinned to them are removed."""

import asyncio
import os

import pytest

from agl.contracts import RolloutQuery
from agl.schemas import ResourceVersion, Rollout, Weights
from agl.stores import MemoryStore
from agl_inspect.presence import worker_name
from agl_inspect.records.state import AlgorithmState, deferral, saved_marks, unsaved
from agl_inspect.versions import list_versions, shown
from agl_run.run.saving import remove_unreachable, to_end


def version(step: int, *, waits: bool = True, experiment: str = "toy") -> ResourceVersion:
    return ResourceVersion(
        name="llm",
        version=f"{experiment}-1-grpo-{step}",
        resource=Weights(uri=f"/nowhere/{step:06d}"),
        algorithm="grpo",
        step=step,
        metadata=deferral(experiment, 1) if waits else {},
    )


def rollout(number: int, *, pinned: ResourceVersion) -> Rollout:
    return Rollout(
        rollout_id=f"r{number}", task=number, experiment="toy", mode="train", resources={"llm": pinned.version}
    )


def test_version_is_unsaved_unless_its_step_was_saved_or_it_could_not_wait() -> None:
    async def work() -> None:
        store = MemoryStore()
        versions = [version(1), version(2), version(3, waits=False), version(1, experiment="other")]
        await store.publish(versions)
        await store.save_state(saved_marks("toy", 1, versions[1:3]))

        assert {("llm", "toy-1-grpo-1"), ("llm", "other-1-grpo-1")} == await unsaved(store, versions)
        found = {
            each.version.version: each.is_saved for each in await list_versions(store, "llm", has_candidates=False)
        }
        assert {"toy-1-grpo-1": False, "toy-1-grpo-2": True, "toy-1-grpo-3": True, "other-1-grpo-1": False} == found
        assert "toy-1-grpo-3" == (await shown(store, "llm", None)).version.version, "the newest that is saved"
        assert not (await shown(store, "llm", "toy-1-grpo-1")).is_saved

    asyncio.run(work())


def test_unfinished_rollouts_of_lost_versions_are_removed_and_all_others_stay() -> None:
    async def work() -> None:
        store = MemoryStore()
        saved, lost, own = version(3), version(4), version(9, waits=False)
        await store.publish([saved, lost, own])
        rollouts = [rollout(n, pinned=v) for n, v in enumerate([lost, lost, saved, lost, own, lost])]
        ended = worker_name().replace(f":{os.getpid()}:", f":{2**22 + 1}:")
        for number, worker in enumerate((ended, "elsewhere@5f3a:7:1")):
            await store.enqueue(rollouts[number : number + 1])
            await store.claim(worker=worker, lease_s=60)
        await store.enqueue(rollouts[2:])
        await store.cancel(["r3"])  # a cancelled rollout is finished, so it stays

        assert 2 == await remove_unreachable(store, "toy", {"grpo": AlgorithmState(step=3)})
        left = {each.rollout_id: each.status for each in await store.rollouts(RolloutQuery(experiment="toy"))}
        kept = {"r2": "queued", "r3": "cancelled", "r4": "queued"}
        assert kept | {"r1": "running"} == left, "who holds r1 may still write to it"
        assert 0 == await remove_unreachable(store, "toy", {"grpo": AlgorithmState(step=3)})

    asyncio.run(work())


def test_work_that_is_cancelled_is_done_to_its_end_before_the_cancellation_goes_on() -> None:
    async def work() -> None:
        begun, may_end, done = asyncio.Event(), asyncio.Event(), list[str]()

        async def save() -> None:
            begun.set()
            await may_end.wait()
            done.append("saved")

        task = asyncio.ensure_future(to_end(save()))
        await begun.wait()
        task.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ["saved"] == done

    asyncio.run(work())
