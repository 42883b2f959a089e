"""A learner that is killed with SIGKILL at any moment: no half promotion, nothing counted or trained twice.

This file is also the program that is killed: it lets a learner work among simulated customers, on a SQLite store. The
customers' past is in a file, because customers do not forget when a learner dies.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from agl.contracts import Store
from agl_inspect.learning import computed_again, first_unit
from agl_inspect.ownership import Ownership
from agl_inspect.records.labels import labels_of
from agl_inspect.records.learning import LearningCandidate, LearningRecords, ReplayPair
from agl_inspect.records.splits import SERVED
from agl_learn.contracts import Conversation, Proposal
from agl_store_sqlite import SQLiteStore
from worlds.customers import PROMPT, Customers, settings

KILLS = 30
CONVERSATIONS = 1200
FLAGS = os.O_APPEND | os.O_CREAT | os.O_WRONLY
ROOT = Path(__file__).parents[3]
RECORDS = LearningRecords("support")
NEXT: dict[str, Collection[str]] = {
    "replay": ("canary", "refused"),
    "canary": ("canary", "watch", "withdrawn"),
    "watch": ("suspicion", "rolled back", "accepted"),
    "suspicion": ("watch", "rolled back", "accepted"),
}


def liked(version: str, kind: str, number: int) -> float:
    """The new version is better than the old one at first, and harmful later."""
    return 0.5 if version == "old" else 0.69 if number < 650 else 0.05


class PersistentCustomers(Customers):
    """Customers who continue where they were; the chance of a conversation depends on its number only."""

    async def continue_in(self, folder: Path) -> None:
        """Serve the rest of all conversations."""
        lines = (folder / "past").read_bytes().splitlines() if (folder / "past").exists() else []
        self.past += [msgspec.json.decode(line, type=Conversation) for line in lines]
        self.now = float(len(self.past))
        self.file, self.rounds = (os.open(folder / name, FLAGS) for name in ("past", "rounds"))
        await self.open("old")
        await self.learner.tick()
        await check_served(self.store)
        await self.serve(CONVERSATIONS - len(self.past))

    def _converse(self) -> None:
        self.chance = random.Random(len(self.past))
        super()._converse()
        os.write(self.file, msgspec.json.encode(self.past[-1]) + b"\n")

    async def propose_version(self, train: Sequence[Conversation]) -> Sequence[Proposal]:
        os.write(self.rounds, f"{self.learner.state.rounds}\n".encode())
        return await super().propose_version(train)

    async def pairs(
        self, candidate: LearningCandidate, held_out: Sequence[Conversation], *, done: Collection[str]
    ) -> AsyncGenerator[ReplayPair]:
        for each in held_out:
            versions = candidate.baseline, candidate.versions
            old, new = (liked(version[PROMPT], each.kind, int(each.rollout_id[1:])) for version in versions)
            yield ReplayPair(unit=each.user, kind=each.kind, old=old, new=new, control=old)


class DeadlyStore:
    """A store that kills its process before or after a write: after so many, or when a candidate moves."""

    def __init__(self, store: Store, *, writes: int | None, is_before: bool) -> None:
        self._store, self._writes, self._is_before = store, writes, is_before

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._deadly(method) if name in ("save_state", "move_label", "publish") else method

    def _deadly(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def write(*args: Any, **given: Any) -> Any:
            if self._writes is not None:
                self._writes -= 1
                is_over = not self._writes
            else:
                is_over = method.__name__ == "save_state" and any("/candidates/" in key for key in args[0])
            if is_over and self._is_before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = await method(*args, **given)
            if is_over:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return write


async def check_served(store: Store) -> None:
    """Check that gateways serve a whole split, and that the label follows it."""
    await check_split(store)
    split = await SERVED.get(store)
    assert split is not None
    assert split.versions["production"][PROMPT] == (await labels_of(store, PROMPT))["production"]


async def check_split(store: Store) -> None:
    """Check that gateways serve a whole split, which fits the stages of the candidates."""
    split, state = await SERVED.get(store), await RECORDS.state.get(store)
    if split is None or state is None:
        return
    assert abs(sum(split.shares.values()) - 1) < 1e-9
    assert split.shares.keys() == split.versions.keys()
    assert all(versions.keys() == {PROMPT} for versions in split.versions.values())
    candidates = await RECORDS.candidates.read(store)
    served = [each for each in candidates.values() if 0 < each.share < 1]
    assert [each.id for each in served] == [split.salt] * len(served)
    for each in served:
        arms = ("production", "candidate") if each.stage == "canary" else ("holdback", "production")
        assert [each.baseline, each.versions] == [split.versions[arm] for arm in arms]
        assert each.share == split.shares[arms[1]]
        assert each.id in (state.current, state.watched)


async def work(folder: Path, seed: int) -> None:
    """Learn until all conversations are over, or, with a seed, until a moment that depends on it."""
    chance, plain = random.Random(seed), SQLiteStore(f"sqlite:///{folder}/learn.db")
    writes = chance.randrange(1, 30) if seed % 3 == 0 else None
    deadly = DeadlyStore(plain, writes=writes, is_before=seed % 3 == 1)
    store = cast("Store", deadly) if seed else plain
    async with Ownership(store, "learner-support", workdir=folder) as own:
        customers = PersistentCustomers(
            liked=liked,
            propose=lambda _: "new",
            users=300,
            settings=settings(every=60, units=8),
            settle_s=5.0,
            store=own.store,
        )
        await customers.continue_in(folder)
    await plain.close()


def start(folder: Path, seed: int) -> int:
    """Let the learner work until it is killed, or until all conversations are over; return how it ended."""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    words = [sys.executable, __file__, str(folder), str(seed)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def looked_at(folder: Path, look: Callable[[Store], Awaitable[Any]]) -> Any:
    async def opened() -> Any:
        store = SQLiteStore(f"sqlite:///{folder}/learn.db")
        try:
            return await look(store)
        finally:
            await store.close()

    return asyncio.run(opened())


async def situation(store: Store) -> tuple[str, float]:
    """Check the split, and return the stage and the share of the newest candidate."""
    await check_split(store)
    newest = max((await RECORDS.candidates.read(store)).values(), key=lambda each: each.number, default=None)
    return ("", 0.0) if newest is None else (newest.stage, newest.share)


async def check_candidate(store: Store, candidate: LearningCandidate) -> None:
    """Check the path, the observations and the decisions of a candidate."""
    pairs = list((await RECORDS.pairs(candidate.id).read(store)).values())
    units = await RECORDS.units(candidate.id).read(store)
    path = [each.stage for each in candidate.moves]
    assert "replay" == path[0]
    assert all(after in NEXT[before] for before, after in pairwise(path)), path
    assert len({pair.unit for pair in pairs}) == len(pairs)
    assert [f"{number:08d}" for number in range(len(units))] == list(units)
    observed = list(units.values())
    for end in range(1, len(candidate.moves)):
        until = msgspec.structs.replace(candidate, moves=candidate.moves[:end])
        names = [unit.unit for unit in observed[first_unit(until) : candidate.moves[end].first]]
        assert len(set(names)) == len(names)
    counted = [rollout for unit in observed for rollout in unit.rollouts]
    assert len(set(counted)) == len(counted)
    for each in (await RECORDS.decisions.read(store)).values():
        if each.candidate == candidate.id:
            gate = computed_again(each, candidate, pairs, observed)
            assert (each.evidence, each.lower, each.verdict) == (gate.evidence, gate.lower, gate.verdict)


async def check_whole(store: Store) -> None:
    """Check all that the learner has recorded."""
    await check_served(store)
    candidates = sorted((await RECORDS.candidates.read(store)).values(), key=lambda each: each.number)
    state = await RECORDS.state.get(store)
    assert state is not None
    assert list(range(1, state.candidates + 1)) == [each.number for each in candidates]
    assert CONVERSATIONS == state.rated
    for each in candidates:
        await check_candidate(store, each)


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="it kills with SIGKILL")
def test_killed_learner_goes_on_where_it_was(tmp_path: Path) -> None:
    kills = Counter[tuple[str, float]]()
    for seed in range(1, KILLS + 1):
        assert start(tmp_path, seed), f"all conversations are over after {seed - 1} kills"
        kills[looked_at(tmp_path, situation)] += 1

    start(tmp_path, 0)

    looked_at(tmp_path, check_whole)
    assert {("replay", 0.0), ("canary", 0.05), ("canary", 0.2), ("canary", 0.5), ("watch", 0.9)} <= kills.keys()
    assert {("suspicion", 0.5), ("rolled back", 0.0)} <= kills.keys()
    rounds = [int(line) for line in (tmp_path / "rounds").read_text().split()]
    assert sorted(rounds) == rounds
    assert set(range(1, rounds[-1] + 1)) == set(rounds)
    assert len(rounds) - rounds[-1] <= KILLS


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), int(sys.argv[2])))
