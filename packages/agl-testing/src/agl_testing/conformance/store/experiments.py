"""Tests of algorithm states, the ledger of trained rollouts, the list of experiments, and presence."""

# ruff: noqa: D102  # the names of the tests say what holds

import msgspec
import pytest

from agl.contracts import ExperimentRecord, LabelMove, Metric, Presence, RolloutQuery, Store, Trained
from agl.errors import ConflictError, FencedError, InvalidIdError, NotFoundError, StoreError
from agl.schemas import PromptTemplate, Record, ResourceVersion, Rollout
from agl_testing.conformance.store.case import store_test
from agl_testing.stores.samples import claim_one, make_span, outcome_of, start_one

STRANGE = (
    "a/b",
    "a//",
    "/",
    " ",
    "%",
    "_",
    "é\u0301",
    "\U0010ffff",
    "'\"\\;--",
    "line\nbreak",
    "nul\0",
    "x" * 10_000,
    "",
)
"""Unusual texts, some of which are allowed as ids."""

HUGE = 32 * 1024 * 1024
"""Size of a large state in bytes."""


def _trained(step: int, *ids: str, experiment: str = "e", run: int = 1, algorithm: str = "grpo") -> Trained:
    return Trained(experiment=experiment, run=run, algorithm=algorithm, step=step, rollout_ids=ids)


class ExperimentTests:
    """Tests of the records and the members of an experiment."""

    @store_test
    async def test_states_are_replaced_found_by_prefix_and_deleted_when_empty(self, store: Store) -> None:
        await store.save_state({"exp/b": b"2", "exp/a": b"\x00\xff", "exp_a": b"3", "e%": b"4"})
        await store.save_state({"exp/b": b"22", "e%": b""})
        loaded = await store.load_state("exp/")
        assert [("exp/a", b"\x00\xff"), ("exp/b", b"22")] == list(loaded.items())
        assert {} == await store.load_state("e%")
        assert ["exp_a"] == list(await store.load_state("exp_"))
        assert ["exp/a", "exp/b", "exp_a"] == list(await store.load_state(""))

    @store_test
    async def test_states_are_written_all_or_none(self, store: Store) -> None:
        await store.save_state({"a": b"1"}, trained=[_trained(1, "r1", "r2")])
        with pytest.raises(ConflictError, match="r2"):
            await store.save_state(
                {"a": b"2", "b": b"2"}, experiment=ExperimentRecord(name="e"), trained=[_trained(2, "r3", "r2")]
            )
        assert {"a": b"1"} == await store.load_state("")
        assert {"r1": 1, "r2": 1} == await store.trained("e", run=1, algorithm="grpo")
        assert [] == await store.experiments()

    @store_test
    async def test_ledger_grows_and_may_be_written_again(self, store: Store) -> None:
        await store.save_state({}, trained=[_trained(1, "r1", "r2")])
        await store.save_state({}, trained=[_trained(1, "r2", "r1"), _trained(2, "r3")])
        assert {"r1": 1, "r2": 1, "r3": 2} == await store.trained("e", run=1, algorithm="grpo")

    @store_test
    async def test_ledger_is_asked_for_some_rollouts(self, store: Store) -> None:
        await store.save_state({}, trained=[_trained(1, "r1", "r2"), _trained(2, "r3")])
        asked = ["r3", "r9", "r1"]
        assert {"r3": 2, "r1": 1} == await store.trained("e", run=1, algorithm="grpo", rollout_ids=asked)
        assert {} == await store.trained("e", run=1, algorithm="grpo", rollout_ids=[])

    @store_test
    async def test_every_run_and_algorithm_has_a_ledger_of_its_own(self, store: Store) -> None:
        ledgers = [("e", 1, "grpo"), ("e2", 1, "grpo"), ("e", 2, "grpo"), ("e", 1, "apo"), ("e/1", 1, "grpo")]
        for step, (experiment, run, algorithm) in enumerate(ledgers, start=1):
            entry = _trained(step, "r1", experiment=experiment, run=run, algorithm=algorithm)
            await store.save_state({}, trained=[entry])
        for step, (experiment, run, algorithm) in enumerate(ledgers, start=1):
            assert {"r1": step} == await store.trained(experiment, run=run, algorithm=algorithm)

    @store_test
    async def test_experiments_are_listed_by_name_as_they_stand(self, store: Store) -> None:
        first = ExperimentRecord(name="b", run=2, live={"p": "v1"}, turn=3)
        await store.save_state({"x": b"1"}, experiment=first)
        await store.save_state({}, experiment=ExperimentRecord(name="a.b", status="finished"))
        last = ExperimentRecord(name="b", run=2, status="finished", turn=4)
        await store.save_state({}, experiment=last)
        assert [ExperimentRecord(name="a.b", status="finished"), last] == await store.experiments()
        assert [last] == await store.experiments("b")
        assert [] == await store.experiments("a")

    @store_test
    async def test_presence_is_replaced_listed_and_withdrawn(self, store: Store) -> None:
        own = Presence(experiment="e", session="s", since=1.5, details={"url": "http://x", "live": {"p": "v1"}})
        workers = [Presence(experiment="e", member=name, session="s", since=2.5) for name in ("w1", "w2")]
        for presence in (*workers, own, Presence(experiment="e2", session="t")):
            await store.announce(presence)
        assert [own, *workers] == _unseen(await store.presences("e"))
        changed = Presence(experiment="e", session="s", since=1.5, lease_s=60.0)
        await store.announce(changed)
        assert [changed] == _unseen(await store.presences("e", member=""))
        await store.withdraw("e", ["w1", "nobody"])
        await store.withdraw("e", ["w1"])
        assert [changed, workers[1]] == _unseen(await store.presences("e"))
        assert [] == await store.presences("e", member="w1")
        assert [] == await store.presences("nobody")

    @store_test
    async def test_presence_is_stamped_by_the_stores_clock(self, store: Store) -> None:
        presence = Presence(experiment="e", member="w1", session="s", since=1.0, seen_at=7.0)
        await store.announce(presence)
        (first,) = await store.presences("e")
        claim = await start_one(store)
        await store.announce(presence)
        (second,) = await store.presences("e")
        assert abs(first.seen_at - claim.attempt.started_at) < 30
        assert first.seen_at <= claim.attempt.started_at <= second.seen_at
        assert 1.0 == second.since

    @store_test
    async def test_lease_is_taken_only_from_the_session_that_is_expected(self, store: Store) -> None:
        first, second = Presence(experiment="e", session="1"), Presence(experiment="e", session="2")
        with pytest.raises(FencedError, match="lease of experiment 'e'"):
            await store.announce(first, replaces="0")
        await store.announce(first, replaces="")
        await store.announce(first, replaces="")  # repeated, as if the response was lost
        with pytest.raises(FencedError):
            await store.announce(second, replaces="")
        await store.announce(second, replaces="1")
        with pytest.raises(FencedError):
            await store.announce(first, replaces="1")
        assert ["2"] == [presence.session for presence in await store.presences("e")]

    @store_test
    async def test_states_are_saved_only_while_the_leases_are_held(self, store: Store) -> None:
        held, other = Presence(experiment="e", session="1"), Presence(experiment="e", member="w", session="1")
        for presence in (held, other):
            await store.announce(presence)
        await store.save_state({"key": b"1"}, leases=[held, other])
        await store.announce(msgspec.structs.replace(other, session="2"))
        await store.withdraw("e", [""])
        for lease in (held, other):
            with pytest.raises(FencedError):
                await store.save_state(
                    {"key": b"2"}, experiment=ExperimentRecord(name="e"), trained=[_trained(1, "r1")], leases=[lease]
                )
        assert ({"key": b"1"}, []) == (await store.load_state(""), await store.experiments())
        assert {} == await store.trained("e", run=1, algorithm="grpo")

    @store_test
    async def test_ids_and_names_that_fit_no_path_or_terminal_are_refused(self, store: Store) -> None:
        longest = "é" * 256
        for record in _named(longest):
            await _write(store, record)
        before = [await _all(store), await store.cursor()]
        for text in ("a/b", "/", "line\nbreak", "nul\0", "\x1b[2J", "\x7f", "\x9b", longest + "x"):
            for record in _named(text):
                with pytest.raises(InvalidIdError, match=r"has \d+ characters; an id or a name has 1 to 256"):
                    await _write(store, record)
        for record in _named("half \ud800"):
            with pytest.raises(StoreError, match=r"halves of characters|surrogates"):
                await _write(store, record)
        with pytest.raises(InvalidIdError):
            await store.enqueue([Rollout(rollout_id="", task=1)])
        with pytest.raises(InvalidIdError):
            await store.save_state({}, experiment=ExperimentRecord(name=""))
        assert before == [await _all(store), await store.cursor()]

    @store_test
    async def test_huge_state_comes_back(self, store: Store) -> None:
        state = bytes(range(256)) * (HUGE // 256)
        await store.save_state({"huge": state, "small": b"1"})
        assert state == (await store.load_state("huge"))["huge"]
        assert b"1" == (await store.load_state("small"))["small"]

    @store_test
    async def test_strange_texts_are_kept_exactly_or_refused(self, store: Store) -> None:
        kept = [text for text in STRANGE if await _use(store, text)]
        assert [" ", "%", "'\"\\;--", "_", "é\u0301", "\U0010ffff"] == sorted(kept)
        assert sorted(kept) == list(await store.load_state(""))
        assert sorted(kept) == [record.name for record in await store.experiments()]
        with pytest.raises(StoreError):
            await store.save_state({"half \ud800": b"1"})
        assert await _use(store, "and it goes on")


def _unseen(presences: list[Presence]) -> list[Presence]:
    """Return the presences with ``seen_at`` reset to 0, after checking that the store set it."""
    assert all(presence.seen_at > 0 for presence in presences)
    return [msgspec.structs.replace(presence, seen_at=0.0) for presence in presences]


def _named(text: str) -> list[Record]:
    """Return records of every kind, each with the text as one of its ids or names."""
    prompt = PromptTemplate(template="{x}")
    return [
        Rollout(rollout_id=text, task=1),
        Rollout(rollout_id="ro", task=1, experiment=text),
        ResourceVersion(name=text, version="v1", resource=prompt),
        ResourceVersion(name="prompt", version=text, resource=prompt),
        LabelMove(name="prompt", label=text, version=text),
        ExperimentRecord(name=text),
        Presence(experiment=text, session="s"),
        Presence(experiment="e", member=text, session="s"),
        Metric(experiment=text, algorithm="a", step=1, name="loss", value=1.0),
    ]


async def _write(store: Store, record: Record) -> None:
    match record:
        case Rollout():
            await store.enqueue([record])
        case ResourceVersion():
            await store.publish([record])
        case LabelMove():
            await store.move_label(record)
        case ExperimentRecord():
            await store.save_state({"state": b"1"}, experiment=record)
        case Presence():
            await store.announce(record)
        case Metric():
            await store.log_metrics([record])
        case _:
            raise AssertionError(record)


async def _all(store: Store) -> list[object]:
    found = await store.rollouts(RolloutQuery())
    return [found, await store.resources(), await store.labels(), await store.experiments(), await store.presences("e")]


async def _use(store: Store, text: str) -> bool:
    """Use a text as every kind of id; returns false if the store raises StoreError and stores nothing."""
    rollout_id = f"ro {text}"
    try:
        await store.save_state(
            {text: b"1"}, experiment=ExperimentRecord(name=text), trained=[_trained(1, text, experiment=text)]
        )
        await store.announce(Presence(experiment=text, member=text, session=text))
        await store.enqueue([Rollout(rollout_id=rollout_id, task=text, experiment=text, group_id=text)])
    except StoreError:
        assert text not in await store.load_state("")
        assert text not in [record.name for record in await store.experiments()]
        with pytest.raises((NotFoundError, StoreError)):
            await store.attempts(rollout_id)
        return False
    claim = await claim_one(store)
    span = make_span(claim, span_id=f"span {text}")
    await store.append_spans([span])
    await store.finish([outcome_of(claim, spans=[span])])
    assert (rollout_id, text) == (claim.rollout.rollout_id, claim.rollout.experiment)
    assert [span.span_id] == [each.span_id for each in await store.spans(rollout_id)]
    assert {text: 1} == await store.trained(text, run=1, algorithm="grpo")
    assert [text] == [presence.member for presence in await store.presences(text)]
    return True
