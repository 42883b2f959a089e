"""The conformance class of stores detects stores that break an invariant."""

import asyncio
import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from agl.contracts import Change, RolloutQuery, Store
from agl.errors import FencedError, NotFoundError
from agl.schemas import Claim, Outcome, ResourceVersion, Rollout, Span
from agl.stores import MemoryStore
from agl_testing.conformance import StoreConformance, StoreLocation


class ForgivesLateFinish(MemoryStore):
    async def finish(self, outcomes: Sequence[Outcome]) -> list[Rollout]:
        try:
            return await super().finish(outcomes)
        except FencedError:
            return []


class Aliases(MemoryStore):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.kept: dict[str, Rollout] = {}

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        self.kept |= {rollout.rollout_id: rollout for rollout in rollouts}
        return await super().enqueue(rollouts)

    async def rollouts(self, query: Any) -> list[Rollout]:
        found = await super().rollouts(query)
        return [msgspec.structs.replace(r, task=self.kept[r.rollout_id].task) for r in found]


class Polls(MemoryStore):
    async def claim(self, *, wait_s: float = 0.0, **options: Any) -> list[Claim]:
        while not (claims := await super().claim(**options)) and wait_s > 0:
            await asyncio.sleep(0.2)
            wait_s -= 0.2
        return claims


class Truncates(MemoryStore):
    async def spans(self, rollout_id: str, **options: Any) -> list[Span]:
        return (await super().spans(rollout_id, **options))[:10]


class KeepsDuplicates(MemoryStore):
    async def append_spans(self, spans: Sequence[Span]) -> None:
        renamed = [msgspec.structs.replace(span, span_id=f"{id(span) + n:016x}") for n, span in enumerate(spans)]
        await super().append_spans(renamed)


class KeepsSecrets(MemoryStore):
    async def publish(self, versions: Sequence[ResourceVersion]) -> None:
        await super().publish([_without_key(version) for version in versions])


class IgnoresUnknown(MemoryStore):
    async def spans(self, rollout_id: str, **options: Any) -> list[Span]:
        try:
            return await super().spans(rollout_id, **options)
        except NotFoundError:
            return []


def _without_key(version: ResourceVersion) -> ResourceVersion:
    if not hasattr(version.resource, "api_key"):
        return version
    return msgspec.structs.replace(version, resource=msgspec.structs.replace(version.resource, api_key=""))


class Opened(StoreLocation, frozen=True, kw_only=True):
    """A location whose store is a class of this file."""

    kind: Any

    def open(self) -> Store:
        return self.kind(self.url)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (ForgivesLateFinish, "test_finish_again_with_another_outcome_is_fenced"),
        (ForgivesLateFinish, "test_late_finish_of_a_lost_attempt_is_fenced"),
        (Aliases, "test_what_is_given_and_returned_never_aliases_what_is_stored"),
        (Polls, "test_waiting_claim_is_woken_by_an_enqueue"),
        (Truncates, "test_spans_page_by_sequence"),
        (Truncates, "test_conversations_come_back_exactly_however_their_prompts_overlap"),
        (KeepsDuplicates, "test_span_appended_again_is_ignored"),
        (KeepsSecrets, "test_key_in_a_resource_is_refused_and_not_kept"),
        (IgnoresUnknown, "test_unknown_ids_are_errors_that_name_them"),
    ],
)
def test_broken_store_fails_the_test_that_protects_from_it(broken: type[MemoryStore], test: str) -> None:
    location = Opened(factory="", url="memory://", kind=broken)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(StoreConformance(), test)(location)


class Scans(MemoryStore):
    """A store whose only fault is that every read scans the names of all records."""

    def __init__(self, url: str = "memory://") -> None:
        super().__init__(url)
        self.names: list[str] = []

    def look_at_all(self) -> None:
        assert 0 == sum(name == "nobody" for name in self.names)

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        self.names += [rollout.rollout_id for rollout in rollouts]
        return await super().enqueue(rollouts)

    async def claim(self, **options: Any) -> list[Claim]:
        self.look_at_all()
        return await super().claim(**options)

    async def changes(self, **options: Any) -> list[Change]:
        self.look_at_all()
        return await super().changes(**options)

    async def spans(self, rollout_id: str, **options: Any) -> list[Span]:
        self.look_at_all()
        return await super().spans(rollout_id, **options)

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        self.look_at_all()
        return await super().rollouts(query)

    async def load_state(self, prefix: str) -> dict[str, bytes]:
        self.look_at_all()
        return await super().load_state(prefix)


@pytest.mark.long
def test_store_that_scans_is_found_out() -> None:
    with pytest.raises(AssertionError) as caught:
        StoreConformance().test_no_operation_costs_more_in_a_large_store(
            lambda _: Opened(factory="", url="memory://", kind=Scans)
        )
    scanning = {"claim", "claim nothing", "read changes", "read spans", "load states"}
    scanning |= {"list queued", "list a group", "list the newest", "list running", "list by creation", "list by status"}
    found = set(re.findall(r"'([a-z ]+)': '", str(caught.value)))
    assert scanning == found


def test_unimplemented_schema_hook_says_what_to_do() -> None:
    location = StoreLocation(factory="my:Store", url="my://")
    with pytest.raises(NotImplementedError, match="has_schema_version"):
        StoreConformance().set_schema_version(location, 1)


def test_store_tests_take_one_fixture_only() -> None:
    names = [name for name in dir(StoreConformance) if name.startswith("test_")]
    assert len(names) > 60
    fixtures = {p for name in names for p in inspect.signature(getattr(StoreConformance, name)).parameters}
    assert {"self", "locate", "location", "tmp_path"} == fixtures
