"""The memory store and the SQLite store behave alike under any sequence of operations."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agl.contracts import Metric, RolloutQuery, Store
from agl.errors import AglError
from agl.schemas import ModelCall, Outcome, PromptTemplate, ResourceVersion, RetryPolicy, Rollout, Span, pack_ids
from agl.stores import MemoryStore
from agl_store_sqlite._store import SQLiteStore

ROLLOUTS = st.sampled_from(["a", "b", "c", "d"])
ATTEMPTS = st.sampled_from([f"{rollout}.{number}" for rollout in "abcd" for number in (1, 2, 3)])
EXPERIMENTS = st.sampled_from(["", "x"])
STATUSES = st.sampled_from(["succeeded", "failed", "timeout", "cancelled", "running"])
PREFIXES = st.lists(st.integers(0, 3), max_size=40).map(lambda ids: [id for id in ids for _ in range(8)])


def make_span(attempt_id: str, number: int, ids: list[int] | None) -> Span:
    call = None
    if ids is not None:
        messages = [{"role": "user", "content": str(id) * 9} for id in ids]
        request = {"messages": messages, "model": "m"}
        prompt = pack_ids(ids)
        call = ModelCall(
            request_id="q", dialect="chat", model="m", request=request, prompt_ids=prompt, response_ids=prompt[:40]
        )
    rollout_id = attempt_id.partition(".")[0]
    attempt_id = attempt_id if "." in attempt_id else ""
    return Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=f"{number:016x}", name="s", call=call)


SPANS = st.lists(
    st.builds(make_span, ATTEMPTS | ROLLOUTS, st.integers(0, 12), st.none() | PREFIXES), min_size=1, max_size=4
)


class Stores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.Runner()
        self.stores: list[Store] = [
            MemoryStore(clock=lambda: self.now),
            SQLiteStore(f"sqlite:///{Path(self.folder.name)}/runs.db", clock=lambda: self.now),
        ]

    def teardown(self) -> None:
        for store in self.stores:
            self.loop.run(store.close())
        self.loop.close()
        self.folder.cleanup()

    def same(self, act: Callable[[Store], Awaitable[Any]]) -> Any:
        """Do the same to both stores; check that both answers or errors are equal."""
        memory, sqlite = (self.loop.run(outcome_of(act, store)) for store in self.stores)
        assert memory == sqlite
        return memory

    @rule(rollout=ROLLOUTS, experiment=EXPERIMENTS, attempts=st.integers(1, 3), limit_s=st.sampled_from([None, 5.0]))
    def enqueue(self, rollout: str, experiment: str, attempts: int, limit_s: float | None) -> None:
        retry = RetryPolicy(max_attempts=attempts, timeout_s=limit_s)
        group = "g" if attempts > 1 else ""
        value = Rollout(rollout_id=rollout, task={"n": (1, 2)}, experiment=experiment, retry=retry, group_id=group)
        self.same(lambda store: store.enqueue([value]))

    @rule(
        limit=st.integers(1, 3), experiment=st.none() | EXPERIMENTS, claim_id=st.sampled_from(["", "k"]),
        lease_s=st.sampled_from([3.0, 100.0]),
    )  # fmt: skip
    def claim(self, limit: int, experiment: str | None, claim_id: str, lease_s: float) -> None:
        self.same(
            lambda store: store.claim(
                worker="w", limit=limit, experiment=experiment, claim_id=claim_id, lease_s=lease_s
            )
        )

    @rule(attempts=st.lists(ATTEMPTS, max_size=2, unique=True))
    def renew(self, attempts: list[str]) -> None:
        self.same(lambda store: store.renew(attempts, lease_s=4.0))

    @rule(attempt=ATTEMPTS, status=STATUSES, spans=SPANS, other=ATTEMPTS)
    def finish(self, attempt: str, status: Any, spans: list[Span], other: str) -> None:
        mine = tuple(span for span in spans if span.attempt_id == attempt)
        outcomes = [Outcome(attempt_id=attempt, status=status, spans=mine)]
        if other < attempt:
            outcomes.append(Outcome(attempt_id=other, status="failed"))
        self.same(lambda store: store.finish(outcomes))

    @rule(rollouts=st.lists(ROLLOUTS, min_size=1, max_size=2))
    def cancel(self, rollouts: list[str]) -> None:
        self.same(lambda store: store.cancel(rollouts))

    @rule(rollouts=st.lists(ROLLOUTS, min_size=1, max_size=2))
    def delete(self, rollouts: list[str]) -> None:
        self.same(lambda store: store.delete(rollouts))

    @rule(spans=SPANS)
    def append(self, spans: list[Span]) -> None:
        self.same(lambda store: store.append_spans(spans))

    @rule(name=st.sampled_from("pq"), version=st.integers(0, 2), text=st.sampled_from("st"))
    def publish(self, name: str, version: int, text: str) -> None:
        value = ResourceVersion(name=name, version=str(version), resource=PromptTemplate(template=text))
        self.same(lambda store: store.publish([value]))

    @rule(key=st.sampled_from(["a/1", "a/2", "b"]), value=st.binary(max_size=2), step=st.integers(0, 2))
    def remember(self, key: str, value: bytes, step: int) -> None:
        self.same(lambda store: store.save_state({key: value}))
        metric = Metric(experiment="x", algorithm=key, step=step, name="n", value=len(value), run=len(value) or 1)
        self.same(lambda store: store.log_metrics([metric]))

    @rule(seconds=st.sampled_from([1.0, 4.0, 50.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(rollout=ROLLOUTS, attempt=st.none() | st.just("") | ATTEMPTS, after=st.integers(0, 3))
    def read_spans(self, rollout: str, attempt: str | None, after: int) -> None:
        self.same(lambda store: store.spans(rollout, attempt_id=attempt, after=after, limit=3))
        self.same(lambda store: store.spans(rollout, attempt_id=attempt))

    @rule(
        experiment=st.none() | EXPERIMENTS, status=st.lists(STATUSES, max_size=2).map(tuple),
        after=st.just("") | ROLLOUTS,
        group=st.sampled_from([None, "", "g"]), is_newest_first=st.booleans(), limit=st.integers(1, 4),
        ids=st.lists(ROLLOUTS, max_size=2).map(tuple),
    )  # fmt: skip
    def list_rollouts(
        self, experiment: Any, status: Any, after: str, group: str | None, is_newest_first: bool, limit: int, ids: Any
    ) -> None:
        query = RolloutQuery(
            experiment=experiment,
            status=status,
            after=after,
            group_id=group,
            is_newest_first=is_newest_first,
            limit=limit,
            ids=ids,
        )
        self.same(lambda store: store.rollouts(query))

    @invariant()
    def shows_the_same(self) -> None:
        self.same(lambda store: store.changes())
        self.same(lambda store: store.cursor())
        self.same(lambda store: store.rollouts(RolloutQuery()))
        for rollout in "ab":
            self.same(lambda store, rollout=rollout: store.attempts(rollout))
        self.same(lambda store: store.resources())
        self.same(lambda store: store.resources("p"))
        self.same(lambda store: store.resource("q"))
        self.same(lambda store: store.load_state("a/"))
        self.same(lambda store: store.metrics("x"))
        self.same(lambda store: store.metrics("x", run=2))


async def outcome_of(act: Callable[[Store], Awaitable[Any]], store: Store) -> Any:
    try:
        return await act(store)
    except AglError as error:
        return type(error), str(error)


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=25, stateful_step_count=30, suppress_health_check=list(HealthCheck))
