"""Retention of a run and of a server: the rollouts that are removed, those that stay, and the state after a kill."""

import asyncio
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import algorithm
from agl.contracts import (
    AlgorithmContext,
    AlgorithmEntry,
    ExperimentRecord,
    LabelMove,
    RolloutQuery,
    StepReport,
    Store,
    Trained,
    VersionScore,
)
from agl.errors import ConfigError, ConflictError, StoreError
from agl.schemas import Outcome, PromptTemplate, ResourceVersion, Rollout
from agl.stores import MemoryStore
from agl_inspect import retention as served
from agl_inspect.ownership import Ownership
from agl_inspect.records.state import AlgorithmState, save_progress
from agl_inspect.retention import RetentionLimits, parse_size, remove_old, retaining
from agl_run import Quiet, RetentionConfig, parse_config
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import eventually

TASKS = [{"n": 0}, {"n": 1}]
ALL = RolloutQuery(limit=10_000)


class Told(Quiet):
    """Collects the lines that a run shows about retention."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines += [text] if text.startswith("retention") else []


class Learner:
    """An algorithm whose source is another experiment; it learns nothing."""

    async def setup(self, context: AlgorithmContext) -> None: ...

    async def step(self) -> StepReport:
        return StepReport(step=1, is_finished=True)

    def state(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...


class LearnerPlugin:
    @agl.hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [
            AlgorithmEntry(
                name="learner", factory=Learner, tunes=("prompt_template",), needs_token_ids=False, shares=True
            )
        ]


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Return a function that opens stores with the same contents."""
    store = MemoryStore()
    return (lambda: store) if request.param == "memory" else lambda: SQLiteStore(f"sqlite:///{tmp_path}/runs.db")


def solve(task: dict[str, int]) -> float:
    return float(task["n"])


def fit(store: Store, folder: Path, retention: RetentionConfig, **settings: Any) -> list[str]:
    """Run an experiment from its start, and return what it said about retention."""
    told = Told()
    trainer = agl.Trainer(
        name="halves", store=store, folder=folder, progress=told, retention=retention, gateway="none", **settings
    )
    trainer.fit(solve, val_dataset=TASKS, fresh=True)
    return told.lines


def within(store: Store, work: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
    async def main() -> Any:
        return await work(store, *args, **options)

    return asyncio.run(main())


async def fill(store: Store, experiment: str, count: int) -> None:
    """Record ``count`` finished rollouts, which end in the order of their ids."""
    ids = [f"{experiment}-{number:03}" for number in range(count)]
    await store.enqueue([Rollout(rollout_id=rollout_id, task={}, experiment=experiment) for rollout_id in ids])
    for _ in ids:
        (claim,) = await store.claim(worker="w", experiment=experiment)
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])


async def ids_in(store: Store) -> list[str]:
    return [rollout.rollout_id for rollout in await store.rollouts(ALL)]


def test_run_removes_rollouts_of_its_earlier_runs_and_says_so(opener: Callable[[], Store], tmp_path: Path) -> None:
    store = opener()
    within(store, fill, "another", 2)
    assert [] == fit(store, tmp_path, RetentionConfig(keep=0))
    lines = fit(store, tmp_path, RetentionConfig(keep=0))
    assert ["retention: removed 2 old rollouts; new ones take their space"] == lines
    left = within(store, ids_in)
    assert ["another-000", "another-001"] == left[:2]
    assert ["halves-2"] * 2 == [rollout_id[:8] for rollout_id in left[2:]]
    within(store, lambda s: s.close())


def test_run_says_how_much_space_it_freed(tmp_path: Path) -> None:
    async def fill_much(store: Store) -> None:
        tasks = [{"text": f"{number} {'x' * 20_000}"} for number in range(200)]
        made = await store.enqueue([Rollout(rollout_id=f"o-{n:03}", task=task) for n, task in enumerate(tasks)])
        await store.cancel([rollout.rollout_id for rollout in made])

    store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")
    within(store, fill_much)
    (line,) = fit(store, tmp_path, RetentionConfig(keep=0, experiments="all"))
    assert line.startswith("retention: removed 200 old rollouts and freed ")
    assert line.endswith(" MiB")
    assert (tmp_path / "runs.db").stat().st_size < 1 << 20
    within(store, lambda s: s.close())


def test_run_keeps_rollouts_that_are_young_or_among_the_newest(tmp_path: Path) -> None:
    store = MemoryStore()
    fit(store, tmp_path, RetentionConfig())
    fit(store, tmp_path, RetentionConfig(older_than="1h"))
    fit(store, tmp_path, RetentionConfig(older_than="0", keep=6))
    assert 6 == len(within(store, ids_in))
    fit(store, tmp_path, RetentionConfig(older_than="0s", keep=5))
    assert 5 == len(within(store, ids_in))


def test_trial_removes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    within(store, fill, "halves", 2)
    trainer = agl.Trainer(
        name="halves", store=store, folder=tmp_path, progress=Quiet(), retention=RetentionConfig(keep=0)
    )
    trainer.dev(solve, TASKS)
    assert 4 == len(within(store, ids_in))


def test_run_spares_what_runs_what_can_be_resumed_and_what_it_learns_from(
    opener: Callable[[], Store], tmp_path: Path
) -> None:
    store = opener()

    async def record(store: Store) -> None:
        for name in ("ended", "unfinished", "source"):
            await fill(store, name, 2)
        await save_progress(store, ExperimentRecord(name="ended", status="finished"))
        await save_progress(store, ExperimentRecord(name="unfinished", status="running"))
        await store.enqueue([Rollout(rollout_id="queued", task={}), Rollout(rollout_id="running", task={})])
        await store.claim(worker="w", experiment="", limit=1)

    within(store, record)
    manager = agl.PluginManager()
    manager.register(LearnerPlugin(), name="learner")
    config = RetentionConfig(keep=0, experiments="all")
    learner = algorithm("learner", tunes="prompt", source="experiment:source")
    prompt = PromptTemplate(template="{n}")
    fit(store, tmp_path, config, plugins=manager, algorithm=learner, initial_resources={"prompt": prompt})
    left = [rollout_id for rollout_id in within(store, ids_in) if not rollout_id.startswith("halves-1-")]
    assert ["queued", "running", "source-000", "source-001", "unfinished-000", "unfinished-001"] == left
    within(store, lambda s: s.close())


def test_removal_spares_experiments_with_a_trainer(opener: Callable[[], Store], tmp_path: Path) -> None:
    async def body() -> None:
        store, other = opener(), opener()
        await fill(store, "trial-dev", 3)
        async with Ownership(other, "trial-dev", workdir=tmp_path):
            report = await remove_old(store, RolloutQuery(), RetentionLimits(keep=1))
            assert ([], 2) == (report.removed, report.kept_for_experiments)
        report = await remove_old(store, RolloutQuery(), RetentionLimits(keep=1))
        assert (["trial-dev-000", "trial-dev-001"], 0) == (report.removed, report.kept_for_experiments)
        await store.close()
        await other.close()

    asyncio.run(body())


def test_retention_keeps_versions_labels_scores_and_the_ledger(opener: Callable[[], Store]) -> None:
    async def body() -> None:
        store = opener()
        await fill(store, "e", 2)
        version = ResourceVersion(name="prompt", version="v1", resource=PromptTemplate(template="a"))
        await store.publish([version])
        await store.move_label(LabelMove(name="prompt", label="production", version="v1"))
        await store.save_scores([VersionScore(name="prompt", version="v1", mean=0.5, low=0.4, high=0.6, n=2, how="h")])
        record = ExperimentRecord(name="e", status="finished", live={"prompt": "v1"}, turn=1)
        await save_progress(store, record, trained={("a", 1): ("e-000",)})
        await remove_old(store, RolloutQuery(), RetentionLimits())
        assert [] == await ids_in(store)
        assert version == await store.resource("prompt", "v1")
        assert ["v1"] == [move.version for move in await store.labels("prompt")]
        assert [0.5] == [score.mean for score in await store.scores("prompt")]
        assert ([record], {"e-000": 1}) == (await store.experiments(), await store.trained("e", run=1, algorithm="a"))
        with pytest.raises(ConflictError):
            await store.save_state(
                {}, trained=[Trained(experiment="e", run=1, algorithm="a", step=2, rollout_ids=("e-000",))]
            )
        await store.close()

    asyncio.run(body())


def test_removals_at_once_leave_the_newest(opener: Callable[[], Store]) -> None:
    async def body() -> None:
        stores = [opener() for _ in range(4)]
        await fill(stores[0], "e", 60)
        reports = await asyncio.gather(*(remove_old(s, RolloutQuery(), RetentionLimits(keep=7)) for s in stores))
        assert [f"e-{number:03}" for number in range(53, 60)] == await ids_in(stores[0])
        assert {f"e-{number:03}" for number in range(53)} == {name for report in reports for name in report.removed}
        for store in stores:
            await store.close()

    asyncio.run(body())


KILLED = """
import asyncio, os, signal, sys
from agl.contracts import RolloutQuery
from agl_store_sqlite import SQLiteStore
from agl_inspect import retention

class Killed(SQLiteStore):
    async def delete(self, rollout_ids):
        if self.batches == 2:
            asyncio.get_running_loop().call_later(0.001, os.kill, os.getpid(), signal.SIGKILL)
        self.batches += 1
        return await super().delete(rollout_ids)

async def main():
    store = Killed(sys.argv[1])
    store.batches = 0
    retention._BATCH = 10
    await retention.remove_old(store, RolloutQuery(), retention.RetentionLimits(keep=5))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_removal_killed_in_the_middle_leaves_a_store_that_reads_well_and_is_continued(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"

    async def body() -> None:
        store = SQLiteStore(url)
        await fill(store, "e", 60)
        command = [sys.executable, "-c", textwrap.dedent(KILLED), url]
        killed = await asyncio.to_thread(subprocess.run, command, check=False)
        assert -signal.SIGKILL == killed.returncode
        left = await ids_in(store)
        assert left == [f"e-{number:03}" for number in range(60 - len(left), 60)]
        assert len(left) % 10 == 0
        assert 5 < len(left) <= 40
        assert len(left) == len(await store.recordings(ALL))
        report = await remove_old(store, RolloutQuery(), RetentionLimits(keep=5))
        assert (len(left) - 5, 5) == (len(report.removed), len(await ids_in(store)))
        await store.close()

    asyncio.run(body())


class Full(MemoryStore):
    """A store that deletes nothing."""

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        raise StoreError("the disk is full; make room")


def test_removal_that_fails_is_said_and_does_not_fail_the_run(tmp_path: Path) -> None:
    store = Full()
    within(store, fill, "halves", 1)
    (line,) = fit(store, tmp_path, RetentionConfig(keep=0))
    assert "retention: old rollouts could not be removed, and the next run tries again: the disk is full" in line
    assert ["finished"] == [record.status for record in within(store, lambda s: s.experiments())]


def test_server_removes_at_the_start_and_again(opener: Callable[[], Store]) -> None:
    async def body() -> None:
        store, said = opener(), list[str]()
        await fill(store, "e", 3)
        async with retaining(store, RetentionLimits(keep=1), say=said.append, every_s=0.05):
            await eventually(lambda: len(said) == 1)
            assert ["e-002"] == await ids_in(store)
            await fill(store, "f", 1)
            await eventually(lambda: len(said) == 2)
            assert ["f-000"] == await ids_in(store)
        assert "retention: removed 2 old rollouts; new ones take their space" == said[0]
        assert {} == await store.load_state("")
        await store.close()

    asyncio.run(body())


def test_of_several_servers_one_removes_at_a_time(
    opener: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        first, second, said = opener(), opener(), list[str]()
        await fill(first, "e", 3)
        turn = Ownership(first, served._TURN, workdir=Path("elsewhere"), beat_s=0.05)
        async with turn:
            async with retaining(second, RetentionLimits(), say=said.append):
                await asyncio.wait_for(_refused(second), 60)
            assert ([], 3) == (said, len(await ids_in(first)))
        async with retaining(second, RetentionLimits(), say=said.append):
            await eventually(lambda: len(said) == 1)
        await first.close()
        await second.close()

    async def _refused(store: Store) -> None:
        assert await served._in_turn(store, RetentionLimits()) is None

    asyncio.run(body())
    assert "ran the removal of old rollouts and did not end it" in caplog.text


def test_experiment_file_takes_a_retention(tmp_path: Path) -> None:
    section = {"older_than": "30d", "keep": 20, "experiments": "all"}
    config = parse_config({"experiment": {"agent": "agent:solve"}, "retention": section})
    assert RetentionConfig(older_than="30d", keep=20, experiments="all") == config.retention
    assert config.retention == agl.Trainer.from_config(config, folder=tmp_path).config.retention


@pytest.fixture
def full(tmp_path: Path) -> Iterator[SQLiteStore]:
    """A store of 40 rollouts with about 20 kB each: 10 in each of four experiments, oldest first."""
    store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")

    async def record() -> None:
        noise = random.Random(1)
        for name in ("ended", "source", "unfinished", "newest"):
            tasks = [{"text": noise.randbytes(10_000).hex()} for _ in range(10)]
            ids = [f"{name}-{number}" for number in range(10)]
            await store.enqueue(
                [Rollout(rollout_id=i, task=task, experiment=name) for i, task in zip(ids, tasks, strict=True)]
            )
            await store.cancel(ids)

    asyncio.run(record())
    yield store
    asyncio.run(store.close())


def test_size_never_takes_what_a_run_that_can_be_resumed_needs(full: SQLiteStore) -> None:
    async def body() -> None:
        settings = {"source": '["rollouts", "experiment:source"]', "text": "sha256:0"}
        state = {"learner": AlgorithmState(step=1, settings=settings)}
        await save_progress(full, ExperimentRecord(name="unfinished", status="running"), state)
        report = await remove_old(full, RolloutQuery(), RetentionLimits(max_bytes=1))
        assert (20, 20) == (len(report.removed), report.kept_for_experiments)
        assert ["source"] * 10 + ["unfinished"] * 10 == [each[:-2] for each in await ids_in(full)]
        assert report.size == await full.size() > 20 * 20_000

    asyncio.run(body())


def test_size_never_takes_the_lineage_of_a_version(full: SQLiteStore) -> None:
    async def body() -> None:
        versions = [
            ResourceVersion(
                name="prompt", version=f"v{n}", parent=parent, resource=PromptTemplate(template="a" * 9_000)
            )
            for n, parent in ((1, ""), (2, "v1"), (3, "v2"))
        ]
        await full.publish(versions)
        await full.move_label(LabelMove(name="prompt", label="production", version="v3"))
        await remove_old(full, RolloutQuery(), RetentionLimits(max_bytes=1))
        assert ([], versions) == (await ids_in(full), await full.resources("prompt"))
        assert ["v3"] == [move.version for move in await full.labels("prompt")]

    asyncio.run(body())


def test_size_never_takes_an_open_conversation(full: SQLiteStore) -> None:
    async def body() -> None:
        await full.enqueue([Rollout(rollout_id="talk", task={}, experiment="served-conversations")])
        await full.claim(worker="gateway", experiment="served-conversations")
        await remove_old(full, RolloutQuery(), RetentionLimits(max_bytes=1))
        assert ["talk"] == await ids_in(full)

    asyncio.run(body())


def test_size_takes_the_oldest_and_no_more_than_it_must(full: SQLiteStore) -> None:
    async def body() -> None:
        most = await full.size() - 100_000
        report = await remove_old(full, RolloutQuery(), RetentionLimits(max_bytes=most))
        assert 5 <= len(report.removed) <= 8
        assert report.removed == [f"ended-{number}" for number in range(len(report.removed))]
        assert report.size is not None
        assert report.size <= most
        assert [] == (await remove_old(full, RolloutQuery(), RetentionLimits(max_bytes=most))).removed
        limits = RetentionLimits(max_bytes=1, keep=31)
        assert 9 == len(report.removed) + len((await remove_old(full, RolloutQuery(), limits)).removed)

    asyncio.run(body())


def test_run_removes_until_the_store_is_small_enough(full: SQLiteStore, tmp_path: Path) -> None:
    most = asyncio.run(full.size()) - 300_000
    (line,) = fit(full, tmp_path, RetentionConfig(max_size=str(most), experiments="all"))
    assert line.startswith("retention: removed ")
    assert asyncio.run(full.size()) <= most


def test_size_of_a_store_that_does_not_say_it_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"MemoryStore\(.*\) does not say its size; name the SQLite file or the database"
    ):
        asyncio.run(remove_old(MemoryStore(), RolloutQuery(), RetentionLimits(max_bytes=1)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10GB", 10**10),
        ("1.5 kB", 1_500),
        ("2MiB", 2 << 20),
        ("3T", 3 * 10**12),
        ("4096", 4096),
        ("7B", 7),
        ("1G", 10**9),
    ],
)
def test_size_is_written_with_a_unit(text: str, expected: int) -> None:
    assert expected == parse_size(text)


@pytest.mark.parametrize("text", ["", "GB", "10 QB", "-1MB", "1e9", "ten"])
def test_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write 500MB, 10GB or 1TB"):
        parse_size(text)
