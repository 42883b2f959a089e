"""Reading large stores: more spans than a page, a rollout that was removed, steps in order."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import REPLAY
from agl.errors import NotFoundError, RunError
from agl.schemas import Rollout, Span
from agl.stores import MemoryStore, all_spans
from agl_inspect.records.names import step_name
from agl_run.replay.script import load_script


def test_all_spans_goes_on_after_a_full_page() -> None:
    async def read(count: int) -> list[str]:
        store = MemoryStore()
        await store.enqueue([Rollout(rollout_id="r", experiment="e", task={})])
        await store.append_spans(
            [Span(rollout_id="r", attempt_id="", span_id=f"{index:016x}", name=str(index)) for index in range(count)]
        )
        return [span.name for span in await all_spans(store, "r", "")]

    for count in (0, 10_000, 10_001):
        assert [str(index) for index in range(count)] == asyncio.run(read(count))


def test_unknown_rollouts_are_an_error_and_a_replay_says_what_it_misses() -> None:
    async def read() -> None:
        store = MemoryStore()
        with pytest.raises(NotFoundError):
            await all_spans(store, "gone")
        plan = {"rollout_id": "gone", "replaced": ["a"]}
        replay = Rollout(rollout_id="r", experiment="e", task={}, metadata={REPLAY: plan})
        with pytest.raises(RunError, match="'gone' is to be replayed and is no longer in the store"):
            await load_script(store, replay)

    asyncio.run(read())


@given(st.lists(st.integers(min_value=0, max_value=10_000_000)))
def test_names_of_steps_sort_as_the_steps_do(steps: list[int]) -> None:
    assert [step_name(step) for step in sorted(steps)] == sorted(step_name(step) for step in steps)
