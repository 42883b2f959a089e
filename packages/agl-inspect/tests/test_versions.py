"""The version that a resource's bare name means is one that people accepted."""

import asyncio
from collections.abc import Sequence
from typing import Any

from agl.contracts import ExperimentRecord
from agl.schemas import PromptTemplate, ResourceVersion
from agl.stores import MemoryStore
from agl_inspect.records.splits import SERVED, ServedSplit
from agl_inspect.versions import current

OURS = ExperimentRecord(name="ours", agent="mine:solve", live={"prompt": "v1"})
ROUND = ExperimentRecord(name="ours-learn-3", agent="mine:solve", live={"prompt": "v2"})
REPLAY = ExperimentRecord(name="ours-replay", live={"prompt": "v3"})


def meant(records: Sequence[ExperimentRecord], split: ServedSplit | None = None, **newest: Any) -> tuple[str, str]:
    """Return the version that the bare name means, and the reason; v4 is the newest of five versions."""

    async def work() -> tuple[str, str]:
        store = MemoryStore()
        made = {"algorithm": "apo"}
        for number in range(5):
            fields = {**made, **newest} if number == 4 else made
            template = PromptTemplate(template=str(number))
            await store.publish([ResourceVersion(name="prompt", version=f"v{number}", resource=template, **fields)])
        for record in records:
            await store.save_state({}, experiment=record)
        if split is not None:
            await SERVED.add(store, {"": split})
        version, reason = await current(store, "prompt")
        return version.version, reason

    return asyncio.run(work())


def split_of(**shares: float) -> ServedSplit:
    """Return a split whose label ``a`` serves v0 and whose label ``b`` serves v3."""
    return ServedSplit(shares=shares, versions={"a": {"prompt": "v0"}, "b": {"prompt": "v3"}})


def test_version_of_a_round_of_learning_or_a_replay_is_not_meant() -> None:
    assert ("v1", "live in ours") == meant([OURS, ROUND, REPLAY])
    assert ("v4", "the newest") == meant([ROUND, REPLAY])


def test_version_that_serves_most_traffic_is_meant_before_a_live_one() -> None:
    assert ("v0", "served as a") == meant([OURS, ROUND], split_of(a=0.9, b=0.1))
    assert ("v3", "served as b") == meant([OURS, ROUND], split_of(a=0.1, b=0.9))


def test_newest_version_is_meant_if_a_person_published_it() -> None:
    assert ("v4", "the newest, published by hand") == meant([OURS], split_of(a=1.0), algorithm="")
