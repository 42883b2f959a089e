"""Served conversations are read from real stores, rated, and their rewards recorded."""

import asyncio
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RolloutQuery, Store
from agl.episodes import episode_reward
from agl.errors import ConfigError
from agl.schemas import Json, ModelCall, Outcome, Reward, Rollout, Span, new_span_id
from agl.stores import MemoryStore, all_spans
from agl_inspect.records.splits import KEY
from agl_inspect.terminal.query import CONVERSATIONS
from agl_learn.contracts import Conversation
from agl_learn.settings import LearnerFile
from agl_learn.traffic import StoreTraffic, traffic_of
from agl_run import LearnSettings
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer

from .conftest import run_with

SETTLE = 300.0
Work = Callable[[Store], Awaitable[None]]


@pytest.fixture(params=["memory", "sqlite"])
def use(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Work], None]:
    def run(work: Work) -> None:
        async def body() -> None:
            store = MemoryStore() if request.param == "memory" else SQLiteStore(f"sqlite:///{tmp_path}/served.db")
            try:
                await asyncio.wait_for(work(store), 60)
            finally:
                await store.close()

        asyncio.run(body())

    return run


def traffic(store: Store, *, emitters: Any = None, folder: Path | None = None, **given: Any) -> StoreTraffic:
    fields: dict[str, Any] = {"tunes": ("prompt",), "feedback": ("thumbs", "repeated-question"), **given}
    settings = LearnSettings(**fields)
    return StoreTraffic(store, settings, emitters=emitters, folder=str(folder or ""))


async def served(
    store: Store, name: str, at: float, *texts: str, user: str = "", metadata: dict[str, Json] | None = None
) -> None:
    """Record a conversation that began at ``at``, with one call whose answer is the last text."""
    own: dict[str, Json] = {**({"user": user} if user else {}), **(metadata or {})}
    rollout = Rollout(rollout_id=name, task={}, experiment=CONVERSATIONS, metadata=own, created_at=at)
    await store.enqueue([rollout])
    await store.claim(worker="gateway", limit=2_000, lease_s=1e9, experiment=CONVERSATIONS)
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts[:-1])]
    response = {"choices": [{"message": {"role": "assistant", "content": texts[-1]}}]}
    call = ModelCall(request_id=name, dialect="chat", model="m", request={"messages": messages}, response=response)
    moment = int(at * 1e9)
    made = Span(
        rollout_id=name,
        attempt_id=f"{name}.1",
        span_id=new_span_id(),
        name="chat m",
        start_ns=moment,
        end_ns=moment,
        call=call,
    )
    await store.append_spans([made])


async def rate(store: Store, name: str, value: float, feedback: str = "") -> None:
    reward = Reward(value=value, source="human", feedback=feedback)
    span = Span(rollout_id=name, attempt_id=f"{name}.1", span_id=new_span_id(), name="evaluate", reward=reward)
    await store.append_spans([span])


async def settled(
    found: StoreTraffic, *, now: float = 1e6, limit: int = 100, last: Conversation | None = None
) -> list[str]:
    """The ids on the first page that has a conversation."""
    after, value = (last.rollout_id, last.started_at) if last else ("", 0.0)
    page = await found.settled(after=after, after_value=value, now=now, limit=limit)
    while not page.conversations and not page.is_last:
        page = await found.settled(after=page.after, after_value=page.after_value, now=now, limit=limit)
    return [each.rollout_id for each in page.conversations]


async def recorded(store: Store, name: str) -> list[Reward]:
    return [span.reward for span in await all_spans(store, name) if span.reward is not None]


def test_conversation_has_its_user_arm_texts_and_reward(use: Callable[[Work], None]) -> None:
    async def work(store: Store) -> None:
        placement: Json = {
            "arm": "candidate",
            "shares": {"production": 0.8, "candidate": 0.2},
            "versions": {},
            "salt": "c1",
        }
        await served(store, "c", 100.0, "hi", "Hello.", "and now?", "Bye.", user="ann", metadata={KEY: placement})
        await rate(store, "c", 0.25, "too short")

        (found,) = (await traffic(store).settled(after="", after_value=0.0, now=1e6, limit=10)).conversations

        said = "and now?\ntoo short"
        assert (
            Conversation(
                rollout_id="c",
                user="ann",
                started_at=100.0,
                salt="c1",
                arm="candidate",
                share=0.2,
                task={"question": "hi", "said": said},
                question="hi",
                answer="Bye.",
                said=said,
                reward=0.25,
                is_explicit=True,
                numbers={"latency": 0.0, "refusals": 0.0, "cost": 0.0, "length": 4.0},
            )
            == found
        )

    use(work)


def test_conversations_come_in_order_once_they_have_settled(use: Callable[[Work], None]) -> None:
    async def work(store: Store) -> None:
        for name, at in (("b", 100.0), ("a", 200.0), ("d", 200.0), ("c", 150.0)):
            await served(store, name, at, "hi", "Hello.")
        found = traffic(store)

        assert [] == await settled(found, now=100.0 + SETTLE - 1)
        assert ["b"] == await settled(found, now=100.0 + SETTLE)
        assert ["b", "c"] == await settled(found, limit=2)
        assert ["a", "d"] == await settled(found, last=Conversation(rollout_id="c", started_at=150.0))
        assert ["d"] == await settled(found, last=Conversation(rollout_id="a", started_at=200.0))
        assert [] == await settled(found, last=Conversation(rollout_id="d", started_at=200.0))

    use(work)


def test_conversations_without_calls_do_not_stop_the_reading(use: Callable[[Work], None]) -> None:
    async def work(store: Store) -> None:
        empty = [Rollout(rollout_id=f"e{n}", task={}, experiment=CONVERSATIONS, created_at=10.0 + n) for n in range(5)]
        await store.enqueue(empty)
        await served(store, "c", 100.0, "hi", "Hello.")

        assert ["c"] == await settled(traffic(store), limit=2)

    use(work)


def test_reward_is_recorded_once_and_a_later_rating_takes_its_place(use: Callable[[Work], None]) -> None:
    async def work(store: Store) -> None:
        await served(store, "c", 100.0, "hi", "Hello.")
        found = traffic(store)
        await settled(found)
        await settled(found)
        await store.finish([Outcome(attempt_id="c.1", status="succeeded")])

        assert [Reward(value=1.0, source="hook")] == await recorded(store, "c")

        await rate(store, "c", 0.0)
        (again,) = await found.recent(now=1e6, limit=10)
        assert (0.0, True) == (again.reward, again.is_explicit)
        assert 0.0 == episode_reward(await all_spans(store, "c"))

    use(work)


def test_reward_is_not_recorded_if_a_person_rated(use: Callable[[Work], None]) -> None:
    async def work(store: Store) -> None:
        await served(store, "c", 100.0, "hi", "Hello.")
        await rate(store, "c", 0.25)

        await settled(traffic(store))

        assert [0.25] == [reward.value for reward in await recorded(store, "c")]

    use(work)


@pytest.mark.parametrize(
    ("gap", "user", "expected"), [(60.0, "ann", 0.0), (SETTLE + 1, "ann", 1.0), (60.0, "bob", 1.0)]
)
def test_question_is_repeated_in_the_next_conversation_of_the_user(
    use: Callable[[Work], None], gap: float, user: str, expected: float
) -> None:
    async def work(store: Store) -> None:
        await served(store, "first", 100.0, "Where is my refund?", "Soon.", user="ann")
        await served(store, "other", 110.0, "Where is my refund?", "Soon.", user="eve")
        await served(store, "next", 100.0 + gap, "where's my refund", "Soon.", user=user)

        (page,) = (await traffic(store).settled(after="", after_value=0.0, now=1e6, limit=1)).conversations
        recent = {each.rollout_id: each.reward for each in await traffic(store).recent(now=1e6, limit=10)}

        assert expected == page.reward == recent["first"]

    use(work)


def test_recent_conversations_are_the_newest_settled_ones_with_a_reward(use: Callable[[Work], None]) -> None:
    async def work(store: Store) -> None:
        for number in range(6):
            await served(store, f"c{number}", 100.0 + number, "hi", "Hello.")
        for number in (0, 1, 3, 5):
            await rate(store, f"c{number}", number / 10)
        found = traffic(store, feedback=("thumbs",))

        recent = await found.recent(now=104.0 + SETTLE, limit=2)

        assert [("c3", 0.3), ("c1", 0.1)] == [(each.rollout_id, each.reward) for each in recent]
        assert [] == await recorded(store, "c2")

    use(work)


def test_judge_sees_the_task_once_and_not_what_people_rated(use: Callable[[Work], None]) -> None:
    seen: list[Json] = []

    def judge(rollout: Rollout, spans: Sequence[Span]) -> float:
        seen.append(rollout.task)
        return 0.5

    async def work(store: Store) -> None:
        await served(store, "c", 100.0, "hi", "Hello.")
        await served(store, "d", 101.0, "hi", "Hello.")
        await rate(store, "d", 1.0)
        found = traffic(store, feedback=("thumbs", "judge"), emitters={"judge": judge})

        first = (await found.settled(after="", after_value=0.0, now=1e6, limit=10)).conversations
        await found.recent(now=1e6, limit=10)

        assert [0.5, 1.0] == [each.reward for each in first]
        assert [{"question": "hi", "said": ""}] == seen

    use(work)


JUDGE = """
feedback = ["judge"]

[policy.critic]
use = "openai"
model = "critic"
base_url = "URL"
api_key_env = ""

[[reward]]
use = "judge"
params = { model = "critic" }
"""


def test_judge_of_the_file_is_asked_about_the_conversation(folder: Path) -> None:
    async def work(file: LearnerFile) -> None:
        await served(file.store, "c", 100.0, "where is my order?", "On its way.")
        (found,) = (await (await traffic_of(file)).settled(after="", after_value=0.0, now=1e6, limit=10)).conversations
        assert 0.7 == found.reward

    with ScriptedModelServer(default=Reply(text="Kind.\nScore: 7")) as critic:
        asyncio.run(run_with(folder, work, url="memory://", toml=JUDGE.replace("URL", critic.base_url)))

    (asked,) = critic.calls
    assert b"where is my order?" in asked.body
    assert b"On its way." in asked.body


TICKETS = """
def task_of(conversation):
    return {"ticket": conversation.question[conversation.question.index("#"):]}

def kind_of(task):
    return "short" if len(task["ticket"]) < 4 else "long"
"""


def test_own_functions_make_the_task_and_its_kind(
    use: Callable[[Work], None], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        await served(store, "bad", 100.0, "no number", "Hello.")
        await served(store, "good", 101.0, "order #12", "Hello.")
        names = {"task": "tickets_of_users:task_of", "kind": "tickets_of_users:kind_of"}
        found = traffic(store, emitters=None, folder=tmp_path, **names)

        (only,) = (await found.settled(after="", after_value=0.0, now=1e6, limit=10)).conversations

        assert ({"ticket": "#12"}, "short") == (only.task, only.kind)
        assert ["conversation bad is left out: it cannot become a task"] == caplog.messages

    monkeypatch.delitem(sys.modules, "tickets_of_users", raising=False)
    (tmp_path / "tickets_of_users.py").write_text(TICKETS, encoding="utf-8")
    use(work)


def test_missing_function_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the task function.*did you mean 'loads'"):
        traffic(MemoryStore(), task="json:load_s")


def test_damaged_record_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def fill() -> None:
        store = SQLiteStore(f"sqlite:///{tmp_path}/served.db")
        await served(store, "a", 100.0, "hi", "Hello.")
        await served(store, "b", 101.0, "hi", "Hello.")
        await store.close()

    async def read() -> list[str]:
        store = SQLiteStore(f"sqlite:///{tmp_path}/served.db")
        try:
            return await settled(traffic(store))
        finally:
            await store.close()

    asyncio.run(fill())
    with closing(sqlite3.connect(tmp_path / "served.db")) as database:
        first = database.execute("SELECT min(key) FROM spans").fetchone()[0]
        database.execute("UPDATE spans SET data = CAST('garbage' AS BLOB) WHERE key = ?", (first,))
        database.commit()

    assert ["b"] == asyncio.run(read())
    assert 1 == sum("conversation a is left out: its record is damaged" in each for each in caplog.messages)


class Counting(MemoryStore):
    """Counts the rollouts that are read."""

    read = 0

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        found = await super().rollouts(query)
        self.read += len(found)
        return found


@pytest.mark.parametrize("older", [10, 1_000])
def test_reading_costs_no_more_in_a_larger_store(older: int) -> None:
    async def work() -> int:
        store = Counting()
        await store.enqueue(
            [Rollout(rollout_id=f"o{n}", task={}, experiment=CONVERSATIONS, created_at=1.0 + n) for n in range(older)]
        )
        for number in range(20):
            await served(store, f"c{number:02d}", 10_000.0 + number, "hi", "Hello.", user=f"u{number}")
        await settled(traffic(store), last=Conversation(rollout_id="c04", started_at=10_004.0), limit=5)
        return store.read

    assert asyncio.run(work()) <= 40
