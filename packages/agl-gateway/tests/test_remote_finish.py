"""A worker on another machine, which knows only the gateway's URL, finds every answered call before it decides."""

import asyncio
from collections.abc import Sequence

from agl.schemas import Outcome, Span
from agl.stores import MemoryStore
from agl_gateway.client import HttpStore

from .conftest import StageFactory


class BusyStore(MemoryStore):
    """A store with slow writes: a reader that does not wait misses the newest spans."""

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await asyncio.sleep(0.05)
        await super().append_spans(spans)


async def test_remote_finish_waits_for_the_calls_that_were_answered(stage: StageFactory) -> None:
    async with stage(store=BusyStore()) as it:
        store = HttpStore(it.url, token=it.tokens.issue("", "", expires_at=2e9, scope="admin"))
        for _ in range(5):
            attempt_id, token = await it.open_attempt()
            async with it.openai(token) as client:
                ask = {"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}
                await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(4)))
            await store.finish([Outcome(attempt_id=attempt_id, status="succeeded")])
            spans = await it.store.spans(attempt_id.rpartition(".")[0], attempt_id=attempt_id)
            assert [False] * 4 == [span.is_late for span in spans if span.call is not None]
        await store.close()


async def test_remote_reader_of_an_attempt_sees_the_calls_that_were_answered(stage: StageFactory) -> None:
    async with stage(store=BusyStore()) as it:
        store = HttpStore(it.url, token=it.tokens.issue("", "", expires_at=2e9, scope="admin"))
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            for number in range(1, 6):
                await client.chat.completions.create(model="main_llm", messages=[{"role": "user", "content": "hi"}])
                spans = await store.spans(attempt_id.rpartition(".")[0], attempt_id=attempt_id)
                assert number == len(spans)
        await store.close()
