"""``agl data restore`` restores rollouts byte for byte, leaves existing ones unchanged, and refuses conflicts."""

import pytest

from agl.contracts import LabelMove, Metric
from agl.errors import ConfigError, ConflictError, NotFoundError
from agl.schemas import PromptTemplate, ResourceVersion, Reward
from agl.stores import MemoryStore
from agl_data.archive import parts
from agl_data.archive.places import Place
from agl_data.archive.restoring import find_parts

from .conftest import archive, contents, ids, record, record_context, restore, span


async def archived(url: str) -> MemoryStore:
    store = MemoryStore()
    await record_context(store)
    await record(store)
    await archive(store, url)
    return store


async def test_restoring_twice_adds_nothing(url):
    store = await archived(url)
    before = await contents(store)
    done = await restore(store, url)
    assert (0, 4) == (done.rollouts, done.known)
    await store.delete(["sums-001"])
    done = await restore(store, url)
    assert (1, 3) == (done.rollouts, done.known)
    assert before == await contents(store)


async def test_a_rollout_with_other_contents_ends_the_restoring_before_its_part(url, monkeypatch):
    monkeypatch.setattr(parts, "PART_ROLLOUTS", 2)

    store, other = await archived(url), MemoryStore()
    await restore(other, url, "sums-003")
    await other.append_spans([span("sums-003", "sums-003.2", 9, name="late", reward=Reward(value=1.0))])
    with pytest.raises(ConflictError, match=r"the rollout 'sums-003' is in the store with other contents"):
        await restore(other, url)
    assert ["sums-000", "sums-001", "sums-003"] == await ids(other)
    assert ["sums-000", "sums-001", "sums-002", "sums-003"] == await ids(store)


async def test_a_dry_run_writes_nothing(url):
    await archived(url)
    other = MemoryStore()
    assert 4 == (await restore(other, url, is_dry_run=True)).rollouts
    assert ([], []) == (await ids(other), await other.resources())


async def test_rollouts_are_named_by_ids_and_by_unique_beginnings(url, monkeypatch):
    monkeypatch.setattr(parts, "PART_ROLLOUTS", 2)

    store, other = MemoryStore(), MemoryStore()
    await record(store, ids=[1, 10, 100, 200])
    await record(store, "words", ids=[7])
    await archive(store, url)
    done = await restore(other, url, "sums-001", "words", "sums-2")
    assert (3, ["sums", "words"]) == (done.rollouts, done.experiments)
    assert ["sums-001", "sums-200", "words-007"] == await ids(other)
    with pytest.raises(ConfigError, match="several rollouts of the archive begin with 'sums-': sums-001, sums-010"):
        await restore(other, url, "sums-")
    with pytest.raises(NotFoundError, match="unknown rollout 'sums-0011'; no id in the archive begins so"):
        await restore(other, url, "sums-0011")
    assert {"words"} == {each.manifest.experiment for each in find_parts(Place(url), experiments=["words"])}
    with pytest.raises(NotFoundError, match="unknown experiment 'word'; did you mean 'words'"):
        find_parts(Place(url), experiments=["word"])


async def test_a_restored_version_never_becomes_the_newest_before_others(url):
    await archived(url)
    other = MemoryStore()
    await other.publish([ResourceVersion(name="prompt", version="mine", resource=PromptTemplate(template="x"))])
    with pytest.raises(ConflictError, match="the store has other versions of the resource 'prompt'"):
        await restore(other, url)
    assert [] == await ids(other)
    assert "mine" == (await other.resource("prompt")).version


async def test_what_went_on_in_the_store_stays(url):
    store = await archived(url)
    await store.publish([ResourceVersion(name="prompt", version="v4", resource=PromptTemplate(template="x"))])
    await store.move_label(LabelMove(name="prompt", label="production", version="v4"))
    metric = Metric(experiment="sums", algorithm="grpo", step=1, name="loss", value=9.0, time=1.0)
    await store.log_metrics([metric])
    await store.delete(["sums-000"])
    assert 1 == (await restore(store, url)).rollouts
    assert "v4" == (await store.resource("prompt")).version
    assert "v4" == (await store.labels("prompt"))[0].version
    assert [metric] == await store.metrics("sums")


async def test_a_label_that_was_moved_otherwise_is_refused(url):
    await archived(url)
    other = MemoryStore()
    await record_context(other)
    with pytest.raises(ConflictError, match="the label 'production' of 'prompt' was moved otherwise"):
        await restore(other, url)
    assert [] == await ids(other)
