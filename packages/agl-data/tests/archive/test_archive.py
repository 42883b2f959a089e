"""``agl data archive``: the rollouts that it writes, those that it skips, and those that it removes from the store."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fsspec
import pytest

from agl.contracts import ExperimentRecord, RolloutQuery, Store
from agl.errors import ConfigError, ConflictError, StoreError
from agl.schemas import Outcome, PromptTemplate, ResourceVersion, Reward, Rollout
from agl.stores import MemoryStore
from agl_data.archive import archiving, parts
from agl_data.archive.archiving import Archived
from agl_data.archive.layout import TABLES, folder_of
from agl_data.archive.places import Place

from .conftest import archive, contents, ids, record, record_context, restore, span


def files(url: str, table: str) -> list[str]:
    return sorted(path.name for path in Path(url).glob(f"*/{table}/*"))


async def test_everything_comes_back_as_it_was(url):
    store, other = MemoryStore(), MemoryStore()
    await record_context(store)
    names = await record(store)
    await store.append_spans([span(names[0], f"{names[0]}.2", 9, name="late", reward=Reward(value=0.75))])
    done = await archive(store, url)
    assert (4, 0, 0) == (done.rollouts, done.known, done.removed)
    assert 4 == (await restore(other, url)).rollouts
    assert await contents(store) == await contents(other)


def test_an_object_store_holds_the_same(url):
    async def work() -> None:
        store, other = MemoryStore(), MemoryStore()
        await record_context(store)
        await record(store)
        bucket = f"memory://{url}"
        await archive(store, bucket, is_removing=True)
        assert [] == await ids(store)
        await restore(other, bucket)
        assert 4 == len(await ids(other))

    try:
        asyncio.run(work())
    finally:
        fsspec.filesystem("memory").rm(f"/{url}", recursive=True)


async def test_archiving_again_adds_only_what_is_new(url, monkeypatch):
    monkeypatch.setattr(parts, "PART_ROLLOUTS", 2)

    store = MemoryStore()
    await record(store, ids=range(5))
    done = await archive(store, url)
    assert (5, 0) == (done.rollouts, done.known)
    before = files(url, "rollouts")
    done = await archive(store, url)
    assert (0, 5, before) == (done.rollouts, done.known, files(url, "rollouts"))
    await record(store, ids=[5])
    done = await archive(store, url)
    assert (1, 5) == (done.rollouts, done.known)
    assert 4 == len(files(url, "rollouts"))


async def test_only_the_chosen_rollouts_are_archived(url):
    now = 1_000.0
    store = MemoryStore(clock=lambda: now)
    await record(store, ids=[0])
    await record(store, "words", ids=[0])
    await store.enqueue([Rollout(rollout_id=f"sums-{end}", task=1, experiment="sums") for end in ("q", "c")])
    await store.cancel(["sums-c"])
    assert 2 == (await archive(store, url, experiments=("sums",), is_dry_run=True)).rollouts
    assert 1 == (await archive(store, url, status=("cancelled",), is_dry_run=True)).rollouts
    assert 0 == (await archive(store, url, older_than_s=1e12, is_dry_run=True)).rollouts
    assert not Path(url).exists()
    assert 3 == (await archive(store, url)).rollouts
    with pytest.raises(ConfigError, match="no rollout of an experiment 'sum' is recorded"):
        await archive(store, url, experiments=("sum",))


async def test_a_removal_spares_what_changed_after_the_archiving(url):
    store = MemoryStore()
    names = await record(store)
    await archive(store, url)
    await store.append_spans([span(names[1], f"{names[1]}.2", 9, name="late", reward=Reward(value=1.0))])
    done = await archive(store, url, is_removing=True)
    assert (3, [names[1]]) == (done.removed, done.changed)
    assert [names[1]] == await ids(store)


async def test_a_removal_spares_what_can_be_resumed_and_what_goes_on(url):
    store = MemoryStore()
    await record(store)
    await store.save_state({}, experiment=ExperimentRecord(name="sums", status="running"))
    await store.enqueue([Rollout(rollout_id="talk", task=1, experiment="served-conversations")])
    await store.claim(worker="w", experiment="served-conversations")
    before = await ids(store)
    done = await archive(store, url, is_removing=True)
    assert (0, 4) == (done.removed, done.needed)
    assert before == await ids(store)


async def test_a_removal_leaves_versions_and_labels(url):
    store = MemoryStore()
    await record_context(store)
    await record(store)
    before = await contents(store)
    await archive(store, url, is_removing=True)
    assert {**before, "recordings": []} == await contents(store)


async def test_nothing_is_removed_when_the_archive_cannot_be_read_back(url):
    store = MemoryStore()
    await record(store)
    await archive(store, url)
    (damaged,) = Path(url).glob("*/spans/*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(StoreError, match="is damaged"):
        await archive(store, url, is_removing=True)
    assert 4 == len(await ids(store))


@pytest.mark.parametrize("table", TABLES)
async def test_an_interrupted_archiving_is_continued(url, table, monkeypatch):
    monkeypatch.setattr(parts, "PART_ROLLOUTS", 2)
    put = Place.put

    def fail(self: Place, name: str, source: Path) -> None:
        if f"/{table}/" in name and len(files(url, table)) == 1:
            raise KeyboardInterrupt
        put(self, name, source)

    store, other = MemoryStore(), MemoryStore()
    await record(store, ids=[0, 1, 5, 7])
    with monkeypatch.context() as broken:
        broken.setattr(Place, "put", fail)
        with pytest.raises(KeyboardInterrupt):
            await archive(store, url)
    assert 2 == (await restore(other, url)).rollouts
    await record(store, ids=[3])
    done = await archive(store, url)
    assert (3, 2) == (done.rollouts, done.known)
    assert 3 == len(files(url, "rollouts")) == len(files(url, "spans")) == len(files(url, "manifests"))
    await restore(other, url)
    assert await ids(store) == await ids(other)


async def test_a_part_that_another_store_is_writing_is_left_alone(url):
    store = MemoryStore()
    await record(store, ids=[0])
    await archive(store, url)
    (path,) = Path(url).glob("*/manifests/*")
    begun = {**json.loads(path.read_text()), "is_whole": False, "writer": "other", "part": "part-begun"}
    path.with_name("part-begun.json").write_text(json.dumps(begun))
    await archive(store, url)
    assert path.with_name("part-begun.json").exists()
    assert 1 == (await restore(MemoryStore(), url)).rollouts


async def test_a_part_that_was_begun_on_another_machine_is_removed(url, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    store = MemoryStore()
    await record(store, ids=[0])
    with monkeypatch.context() as broken:
        broken.setattr(Place, "put", stop)
        broken.setattr(socket, "gethostname", lambda: "pod-1")
        with pytest.raises(KeyboardInterrupt):
            await archive(store, url)
    await record(store, ids=[1])
    monkeypatch.setattr(socket, "gethostname", lambda: "pod-2")
    await archive(store, url)
    assert 1 == len(files(url, "rollouts")) == len(files(url, "manifests"))


def test_rollouts_of_another_run_with_ids_of_the_archive_are_named_and_stay(url):
    async def work() -> None:
        now = 1_000.0
        first, other = MemoryStore(clock=lambda: now), MemoryStore(clock=lambda: now + 1)
        await record(first, ids=[0, 1])
        names = await record(other, ids=[1, 2])
        await archive(first, url)
        assert (1, 0, names[:1]) == _found(await archive(other, url, is_dry_run=True))
        assert (1, 0, names[:1]) == _found(await archive(other, url))
        done = await archive(other, url, is_removing=True)
        assert ((0, 1, names[:1]), 1, []) == (_found(done), done.removed, done.changed)
        assert names[:1] == await ids(other)

    def _found(done: Archived) -> tuple[int, int, list[str]]:
        return done.rollouts, done.known, done.others

    asyncio.run(work())


async def test_a_version_with_a_number_that_is_none_is_archived_again_and_restored(url):
    store = MemoryStore()
    await record(store)
    version = {"name": "prompt", "version": "v2", "resource": PromptTemplate(template="x")}
    await store.publish([ResourceVersion(**version, metadata={"reward": float("nan")})])
    await archive(store, url)
    await archive(store, url)
    assert 4 == (await restore(store, url)).known


async def test_a_second_process_is_refused(url, monkeypatch):
    @asynccontextmanager
    async def taken(store: Store, turn: str, *, title: str) -> AsyncIterator[None]:
        yield None

    store = MemoryStore()
    await record(store)
    with monkeypatch.context() as busy:
        busy.setattr(archiving, "taking_turns", taken)
        with pytest.raises(ConflictError, match="another process archives this store; wait until it has ended"):
            await archive(store, url)
    assert not Path(url).exists()
    assert 4 == (await archive(store, url)).rollouts


async def test_a_folder_of_others_is_refused(url):
    store = MemoryStore()
    await record(store)
    Path(url).mkdir()
    (Path(url) / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is neither an archive nor empty: it has 'notes.txt'"):
        await archive(store, url)
    with pytest.raises(ConfigError, match="is a file, and an archive is a folder"):
        await archive(store, f"{url}/notes.txt")


def test_an_empty_store_makes_no_archive(url):
    done = asyncio.run(archive(MemoryStore(), url))
    assert ([], 0) == (done.experiments, done.rollouts)
    assert not Path(url).exists()


@pytest.mark.parametrize("name", ["", "..", ".hidden", "agl-data.json", "a b=[x]*?", "%", "ü" * 200, "manifests"])
async def test_an_experiment_may_have_any_name(url, name):
    store, other = MemoryStore(), MemoryStore()
    await store.enqueue([Rollout(rollout_id="a", task=1, experiment=name)])
    await store.cancel(["a"])
    await archive(store, url)
    assert 1 == (await restore(other, url)).rollouts
    assert name == (await other.rollouts(RolloutQuery()))[0].experiment


def test_experiments_have_folders_of_their_own():
    names = ["", "%", "a", "a%", "..", ".", "%2E", "agl-data.json", "ü" * 200, "ü" * 199, "a/b", "a%2Fb"]
    assert len(names) == len({folder_of(name) for name in names})
    assert all("/" not in folder_of(name) and len(folder_of(name)) < 200 for name in names)


async def test_a_version_with_other_contents_is_refused(url):
    async def publish(text: str) -> MemoryStore:
        store = MemoryStore()
        await store.publish([ResourceVersion(name="prompt", version="v2", resource=PromptTemplate(template=text))])
        await record(store)
        return store

    await archive(await publish("a"), url)
    with pytest.raises(ConflictError, match=r"has prompt@v2 of another run of the experiment 'sums'"):
        await archive(await publish("b"), url)


async def test_two_stores_fill_one_archive(url):
    other = MemoryStore()
    for each in (0, 1):
        store = MemoryStore()
        await record(store, ids=[each])
        await archive(store, url, is_removing=True)
    assert 2 == (await restore(other, url)).rollouts
    assert ["sums-000", "sums-001"] == await ids(other)


async def test_an_outcome_without_spans_is_archived(url):
    store, other = MemoryStore(), MemoryStore()
    await store.enqueue([Rollout(rollout_id="a", task=None), Rollout(rollout_id="b", task=float("inf"))])
    for claim in await store.claim(worker="w", limit=2):
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="failed")])
    await archive(store, url)
    await restore(other, url)
    assert await contents(store) == await contents(other)
