"""``agl data copy`` copies everything unchanged, completes an interrupted copy, and overwrites nothing."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from agl import Reward, Rollout, Span
from agl.contracts import ExperimentRecord, LabelMove, Metric, RolloutQuery, Store, Trained, VersionScore
from agl.errors import ConflictError
from agl.schemas import ErrorInfo, Outcome, PromptTemplate, ResourceVersion, RetryPolicy
from agl.stores import MemoryStore, read_recordings
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

RETRY = RetryPolicy(max_attempts=2)
FAILED = ErrorInfo(type="ValueError", message="no", traceback="...")


def reward(rollout_id: str, attempt_id: str, value: float) -> Span:
    span_id = f"{round(value * 100):016x}"
    given = Reward(value=value)
    return Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=span_id, name="reward", reward=given)


async def fill(store: Store, experiment: str) -> None:
    """Record an experiment with four rollouts: retried with late spans, cancelled, started again, and queued."""
    ids = [f"{experiment}-{number}" for number in range(4)]
    rollouts = [
        Rollout(rollout_id=each, task={"q": each}, experiment=experiment, retry=RETRY, resources={experiment: "v2"})
        for each in ids
    ]
    versions = [
        ResourceVersion(name=experiment, version=name, resource=PromptTemplate(template=name), created_at=5.0)
        for name in ("v1", "v2")
    ]
    await store.publish(versions)
    await store.enqueue(rollouts[:2])
    for status in ("failed", "succeeded"):
        claims = await store.claim(worker="w", limit=2, experiment=experiment)
        ended = [
            Outcome(
                attempt_id=claim.attempt.attempt_id,
                status=status,
                error=FAILED if status == "failed" else None,
                spans=(reward(claim.rollout.rollout_id, claim.attempt.attempt_id, 0.5),),
            )
            for claim in claims
        ]
        await store.finish(ended)
    await store.append_spans([reward(ids[0], f"{ids[0]}.2", 0.75)])
    await store.enqueue(rollouts[2:])
    await store.cancel([ids[2]])
    await store.append_spans([reward(ids[2], "", 0.25)])
    for version in ("v1", "v2", "v1"):
        await store.move_label(LabelMove(name=experiment, label="production", version=version, reason="try"))
    await store.save_scores([VersionScore(name=experiment, version="v1", mean=0.5, low=0.1, high=0.9, n=4, how="x")])
    await store.log_metrics([Metric(experiment=experiment, algorithm="a", step=1, name="loss", value=0.5, time=1.0)])
    ledger = Trained(experiment=experiment, run=1, algorithm="a", step=1, rollout_ids=(ids[0],))
    record = ExperimentRecord(name=experiment, live={experiment: "v2"}, turn=1, agent="agent:solve")
    await store.save_state({f"experiment/{experiment}/1/algorithm/a": b"{}"}, experiment=record, trained=[ledger])


async def contents(store: Store) -> dict[str, Any]:
    """Return the whole contents of a store as builtin values."""
    names = [version.name for version in await store.resources()]
    records = await store.experiments()
    found = {
        "recordings": [each async for each in read_recordings(store, RolloutQuery(), spans="all")],
        "resources": [await store.resources(name) for name in names],
        "labels": [await store.labels(name) for name in names],
        "moves": [await store.label_moves(name, "production") for name in names],
        "scores": [await store.scores(name) for name in names],
        "metrics": [await store.metrics(record.name) for record in records],
        "experiments": records,
        "trained": [await store.trained(record.name, run=1, algorithm="a") for record in records],
        "states": {key: value.decode() for key, value in (await store.load_state("")).items()},
    }
    return msgspec.to_builtins(found)


def use(path: Path, work: Callable[[Store], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        store = SQLiteStore(f"sqlite:///{path}")
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["data", "copy", *words], prog_name="agl")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A store with two experiments and a state that belongs to neither."""
    path = tmp_path / "from.db"

    async def write(store: Store) -> None:
        await fill(store, "calc")
        await fill(store, "sql")
        await store.save_state({"served/x": b"kept"})

    use(path, write)
    return path


def test_copy_has_everything_as_it_was(source, tmp_path):
    target = tmp_path / "to.db"
    done = run(str(source), str(target))
    assert (0, "copied 2 experiments, 8 rollouts\n") == (done.exit_code, done.stdout), done.output
    expected, found = use(source, contents), use(target, contents)
    assert 8 == len(found["recordings"])
    assert [True] == [span["is_late"] for span in found["recordings"][0]["spans"] if span.get("is_late")]
    assert expected == found


def test_queued_rollouts_of_a_copy_can_be_claimed(source, tmp_path):
    run(str(source), str(tmp_path / "to.db"))
    claims = use(tmp_path / "to.db", lambda store: store.claim(worker="w", limit=9))
    assert ["calc-3.1", "sql-3.1"] == [claim.attempt.attempt_id for claim in claims]


def test_one_experiment_is_copied_alone(source, tmp_path):
    done = run(str(source), str(tmp_path / "to.db"), "--experiment", "sql", "--json")
    assert {"experiments": ["sql"], "rollouts": 4, "known": 0, "damaged": []} == json.loads(done.stdout)
    found = use(tmp_path / "to.db", contents)
    assert {"sql"} == {recording["rollout"]["experiment"] for recording in found["recordings"]}
    assert [["sql"]] == [sorted({version["name"] for version in versions}) for versions in found["resources"]]
    assert ["experiment/sql/1/algorithm/a"] == list(found["states"])


def test_repeated_copy_completes_an_interrupted_one(source, tmp_path):
    target = tmp_path / "to.db"

    async def begin(store: Store) -> None:
        async def page(other: Store) -> Any:
            return await other.recordings(RolloutQuery(limit=3), spans="all")

        await store.restore(await asyncio.to_thread(use, source, page))

    use(target, begin)
    done = run(str(source), str(target))
    assert "copied 2 experiments, 5 rollouts; 3 were there already\n" == done.stdout, done.output
    assert use(source, contents) == use(target, contents)
    assert "copied 2 experiments, 0 rollouts; 8 were there already\n" == run(str(source), str(target)).stdout


def test_positions_in_the_change_feed_stay_with_their_store(source, tmp_path):
    use(source, lambda store: store.save_state({"experiment/calc/exporter/otlp": b"9"}))
    run(str(source), str(tmp_path / "to.db"))
    copied = use(tmp_path / "to.db", lambda store: store.load_state("experiment/calc/"))
    assert ["experiment/calc/1/algorithm/a"] == list(copied)


def test_experiment_that_went_on_is_not_overwritten(source, tmp_path):
    target = tmp_path / "to.db"
    run(str(source), str(target))
    record = ExperimentRecord(name="calc", turn=2)
    use(target, lambda store: store.save_state({}, experiment=record))
    before = use(target, contents)
    done = run(str(source), str(target))
    assert 1 == done.exit_code
    assert "an experiment 'calc' that went another way; nothing was copied" in " ".join(done.output.split())
    assert before == use(target, contents)


REFUSED = {
    "running": "rollout 'calc-3' is running; stop what runs the experiment 'calc'",
    "same": "from.db is the store to copy from; name another one",
    "unknown": "experiment 'none'",
    "missing": "there is no store",
}


@pytest.mark.parametrize("case", REFUSED)
def test_copy_that_cannot_be_right_is_refused(case, source, tmp_path):
    words = {
        "running": (str(source), str(tmp_path / "to.db")),
        "same": (str(source), f"sqlite:///{tmp_path}/./from.db"),
        "unknown": (str(source), str(tmp_path / "to.db"), "--experiment", "none"),
        "missing": (str(tmp_path / "none.db"), str(tmp_path / "to.db")),
    }
    if case == "running":
        use(source, lambda store: store.claim(worker="w", limit=1, experiment="calc"))
    done = run(*words[case])
    assert 1 == done.exit_code, done.output
    assert REFUSED[case] in " ".join(done.output.split())


def test_memory_store_takes_recordings_too(source):
    async def restored(store: Store) -> tuple[Any, Any]:
        copied = MemoryStore()
        recordings = await store.recordings(RolloutQuery(), spans="all")
        await copied.restore(recordings)
        other = msgspec.structs.replace(recordings[0].rollout, task="other")
        with pytest.raises(ConflictError, match="already stored with other content"):
            await copied.restore([msgspec.structs.replace(recordings[0], rollout=other)])
        return recordings, await copied.recordings(RolloutQuery(), spans="all")

    expected, found = use(source, restored)
    assert expected == found
