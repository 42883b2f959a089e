"""Only one trainer owns an experiment: a live owner is named, a dead one replaced, a replaced one cannot save."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import ExperimentRecord, Presence, RolloutQuery, Store, Trained
from agl.errors import ConfigError, FencedError, StoreError
from agl.schemas import Outcome, Rollout
from agl.stores import MemoryStore
from agl_inspect.ownership import Ownership
from agl_inspect.presence import worker_name
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import eventually

Opener = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Return a function that opens stores with the same contents: always one in memory, or several on one file."""
    store = MemoryStore()
    return (lambda: store) if request.param == "memory" else lambda: SQLiteStore(f"sqlite:///{tmp_path}/runs.db")


def run(opener: Opener, body: Callable[[Store, Store], Awaitable[None]]) -> None:
    """Run a test with the stores of two trainers."""

    async def main() -> None:
        first, second = opener(), opener()
        await body(first, second)
        await first.close()
        await second.close()

    asyncio.run(main())


def own(store: Store, folder: str, *, lease_s: float = 60.0, beat_s: float = 0.05) -> Ownership:
    return Ownership(store, "e", workdir=Path("/trainers") / folder, lease_s=lease_s, beat_s=beat_s)


async def leave_owner(store: Store, name: str = "host@elsewhere:1:0", workdir: str = "/trainers/one") -> None:
    """Write the presence that a killed trainer leaves; without arguments, that of a trainer on another machine."""
    await store.announce(Presence(experiment="e", session=name, details={"workdir": workdir}))


def test_second_trainer_from_another_folder_is_refused_with_the_first_ones_place(opener: Opener) -> None:
    async def body(first: Store, second: Store) -> None:
        async with own(first, "one"):
            with pytest.raises(
                ConfigError, match=rf"runs already, by process {os.getpid()} on .* \(folder /trainers/one\)"
            ):
                async with own(second, "two"):
                    pass
            async with Ownership(second, "another", workdir=Path("/trainers/two")):
                pass
        async with own(second, "two"):
            pass
        assert [] == await second.presences("e")

    run(opener, body)


def test_of_trainers_that_start_at_once_one_runs(opener: Opener) -> None:
    async def body(first: Store, second: Store) -> None:
        async with AsyncExitStack() as stack:
            owners = [own(store, f"{number}") for number, store in enumerate((first, second) * 3)]
            started = await asyncio.gather(*map(stack.enter_async_context, owners), return_exceptions=True)
            assert 1 == len([one for one in started if isinstance(one, Ownership)])
            assert 5 == len([one for one in started if isinstance(one, ConfigError)])

    run(opener, body)


def test_owner_that_was_killed_elsewhere_is_replaced_after_its_lease(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(first: Store, second: Store) -> None:
        await leave_owner(first)
        async with own(second, "two", lease_s=0.3) as owner:
            await owner.store.save_state({"x": b"1"})
        assert {"x": b"1"} == await first.load_state("")

    run(opener, body)
    assert "process 1 on 'host' (folder /trainers/one) ran experiment 'e' and did not end it" in caplog.text


def test_owner_that_was_killed_on_this_machine_is_replaced_at_once(opener: Opener) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    dead = (worker_name().replace(f":{os.getpid()}:", f":{ended.pid}:"), "/trainers/one")
    same_folder = (worker_name(), "/trainers/two")  # its lock is held here

    async def body(first: Store, second: Store) -> None:
        for name, workdir in (dead, same_folder):
            await leave_owner(first, name, workdir)
            async with asyncio.timeout(30), own(second, "two", lease_s=600):
                pass

    run(opener, body)


def test_trainer_that_was_replaced_saves_nothing_more_and_says_by_whom(opener: Opener) -> None:
    losses: list[FencedError] = []

    async def body(first: Store, second: Store) -> None:
        async with own(first, "one", beat_s=600) as stopped:
            stopped.on_loss = losses.append
            await stopped.store.save_state({"x": b"1"})
            async with own(second, "two", lease_s=0.3) as owner:
                for write in late_writes(stopped.store):
                    with pytest.raises(FencedError, match=r"taken over by process .* \(folder /trainers/two\)"):
                        await write()
                assert [] == await second.experiments()
                assert {} == await second.trained("e", run=1, algorithm="a")
                await owner.store.save_state({"x": b"2"})
        assert {"x": b"2"} == await second.load_state("")

    run(opener, body)
    assert 1 == len(losses)


def late_writes(store: Store) -> list[Callable[[], Awaitable[object]]]:
    ledger = [Trained(experiment="e", run=1, algorithm="a", step=1, rollout_ids=("r",))]
    return [
        lambda: store.save_state({"x": b"0"}, experiment=ExperimentRecord(name="e"), trained=ledger),
        lambda: store.enqueue([Rollout(rollout_id="r", task=1, experiment="e")]),
        lambda: store.log_metrics([]),
        lambda: store.claim(worker="w"),
    ]


def test_attempt_that_runs_when_its_trainer_is_replaced_is_still_recorded(opener: Opener) -> None:
    async def body(first: Store, second: Store) -> None:
        async with own(first, "one", beat_s=0.05) as stopped:
            await stopped.store.enqueue([Rollout(rollout_id="r", task=1, experiment="e")])
            (claim,) = await stopped.store.claim(worker="w")
            await leave_owner(second)

            async def is_lost() -> bool:
                try:
                    await stopped.check()
                except FencedError:
                    return True
                return False

            await eventually(is_lost)
            await stopped.store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])
            assert ["succeeded"] == [attempt.status for attempt in await second.attempts("r")]

    run(opener, body)


def test_trainer_that_could_not_beat_for_long_asks_before_it_writes(opener: Opener) -> None:
    async def body(first: Store, second: Store) -> None:
        async with own(first, "one", lease_s=0.0, beat_s=600) as late:
            await late.store.enqueue([Rollout(rollout_id="r", task=1, experiment="e")])
            await leave_owner(second)
            with pytest.raises(FencedError):
                await late.store.enqueue([Rollout(rollout_id="s", task=1, experiment="e")])
        assert ["r"] == [rollout.rollout_id for rollout in await second.rollouts(RolloutQuery())]

    run(opener, body)


def test_store_that_is_away_for_a_while_does_not_end_the_ownership(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryStore):
        is_away = False

        async def announce(self, *args: Any, **kwargs: Any) -> None:
            if self.is_away:
                raise StoreError("the store is away")
            await super().announce(*args, **kwargs)

    async def main() -> None:
        store = Away()
        async with own(store, "one") as owner:
            store.is_away = True
            await eventually(lambda: "the store is away" in caplog.text)
            store.is_away = False
            await owner.store.save_state({"x": b"1"})
        assert {"x": b"1"} == await store.load_state("")

    asyncio.run(main())
