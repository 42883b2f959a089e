"""What only the SQLite store does: a file that survives crashes, is shared, migrated, refused, and stays small."""

import asyncio
import logging
import random
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agl.contracts import RolloutQuery
from agl.errors import SchemaVersionError, StoreError
from agl.schemas import ModelCall, Outcome, RetryPolicy, Rollout, Span, pack_floats, pack_ids
from agl_store_sqlite import _acknowledged, _schema
from agl_store_sqlite._schema import CURRENT
from agl_store_sqlite._store import SQLiteStore

WRITER = """
import asyncio, sys
from agl.schemas import Outcome, Rollout, Span
from agl_store_sqlite import SQLiteStore

async def work(store, worker):
    for number in range(100000):
        rollout_id = f"{worker}-{number}"
        await store.enqueue([Rollout(rollout_id=rollout_id, task=number)])
        (claim,) = await store.claim(worker=worker, experiment=None)
        attempt = claim.attempt
        spans = [Span(rollout_id=attempt.rollout_id, attempt_id=attempt.attempt_id, span_id=f"{at:016x}", name="s")
                 for at in range(3)]
        await store.append_spans(spans[:2])
        await store.finish([Outcome(attempt_id=attempt.attempt_id, status="succeeded", spans=tuple(spans[2:]))])
        sys.stdout.write(attempt.attempt_id + "\\n")
        sys.stdout.flush()

async def main():
    store = SQLiteStore(sys.argv[1])
    await asyncio.gather(*(work(store, f"{sys.argv[2]}{at}") for at in range(3)))

asyncio.run(main())
"""

PATIENT = """
import asyncio, sys
from agl_store_sqlite import SQLiteStore

async def main():
    store = SQLiteStore(sys.argv[1])
    print("ready", flush=True)
    claims = await store.claim(worker="other", wait_s=120)
    print(claims[0].rollout.rollout_id, flush=True)
    await store.close()

asyncio.run(main())
"""

FULL = """
import resource, sys
from agl_store_sqlite import SQLiteStore

resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    SQLiteStore(sys.argv[1])
except Exception as error:
    print(error)
"""


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def spawn(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
async def test_acknowledged_writes_survive_kill(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "runs.db"
    workers = [spawn(WRITER, url_of(path), name) for name in "ab"]
    acknowledged: list[str] = []
    for worker in workers:
        assert worker.stdout is not None
        acknowledged.append(worker.stdout.readline().strip())
    time.sleep(random.Random(seed).uniform(0.0, 0.1))
    for worker in workers:
        worker.kill()
    for worker in workers:
        rest, _ = worker.communicate()
        acknowledged += [line for line in rest.split("\n")[:-1] if line]

    assert len(acknowledged) >= 2
    store = SQLiteStore(url_of(path))
    for attempt_id in acknowledged:
        rollout_id = attempt_id.rpartition(".")[0]
        (rollout,) = await store.rollouts(RolloutQuery(ids=(rollout_id,)))
        assert "succeeded" == rollout.status
        assert [1, 2, 3] == [span.sequence for span in await store.spans(rollout_id)]
    await store.close()


def test_claim_wakes_for_another_process(tmp_path: Path) -> None:
    url = url_of(tmp_path / "runs.db")
    other = spawn(PATIENT, url)
    assert other.stdout is not None
    assert "ready" == other.stdout.readline().strip()
    time.sleep(0.2)

    async def enqueue() -> None:
        store = SQLiteStore(url)
        await store.enqueue([Rollout(rollout_id="a", task=None)])
        await store.close()

    begin = time.monotonic()
    asyncio.run(enqueue())
    assert "a" == other.communicate(timeout=120)[0].strip()
    assert time.monotonic() - begin < 30.0  # and not when its 120 s are over


async def write(path: Path, rollouts: int) -> SQLiteStore:
    """Write to a store and return the open store, so that all data is still in the log beside the file."""
    store = SQLiteStore(url_of(path))
    for number in range(rollouts):
        await store.enqueue([Rollout(rollout_id=f"ro-{number:03}", task=number)])
    return store


async def reopen(path: Path) -> tuple[int, str]:
    """Open a store; return the number of rollouts, and the messages logged while opening."""
    handler, logger = ListHandler(), logging.getLogger("agl_store_sqlite")
    logger.addHandler(handler)
    store = SQLiteStore(url_of(path))
    logger.removeHandler(handler)
    found = await store.rollouts(RolloutQuery())
    await store.close()
    return len(found), handler.text


class ListHandler(logging.Handler):
    """Collects the text of messages."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def copy_store(path: Path, folder: Path) -> Path:
    """Copy an open store with the files beside it."""
    folder.mkdir()
    for file in path.parent.glob("runs.db*"):
        if not file.name.endswith("-shm"):  # as after a crash of the machine
            shutil.copy(file, folder)
    return folder / path.name


def damage(wal: Path, at: float) -> None:
    """Flip one bit of a log, at the fraction ``at`` of the log's length."""
    data = bytearray(wal.read_bytes())
    data[int(len(data) * at)] ^= 1
    wal.write_bytes(data)


async def test_changes_behind_damage_of_the_log_are_reported_with_their_cursors(tmp_path: Path) -> None:
    store = await write(tmp_path / "runs.db", rollouts=40)
    copies = {name: copy_store(tmp_path / "runs.db", tmp_path / name) for name in ("whole", "middle", "start", "no")}
    await store.close()
    assert (40, "") == await reopen(tmp_path / "runs.db")
    assert (40, "") == await reopen(copies["whole"])

    damage(copies["middle"].with_name("runs.db-wal"), 0.7)
    left, said = await reopen(copies["middle"])
    assert 0 < left < 40
    assert f"up to {40 - left} are missing, those after cursor {left} up to 40. SQLite" in said
    store = await write(copies["middle"], rollouts=40)
    await store.close()
    assert (40, "") == await reopen(copies["middle"])

    damage(copies["start"].with_name("runs.db-wal"), 0.01)
    copies["no"].with_name("runs.db-wal").unlink()
    for name in ("start", "no"):
        left, said = await reopen(copies[name])
        assert (0, True) == (left, "up to 40 are missing, those after cursor 0 up to 40" in said)


async def test_store_in_the_place_of_a_removed_one_lost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    await (await write(path, rollouts=3)).close()
    path.unlink()
    assert (0, "") == await reopen(path)
    assert (0, "") == await reopen(path)
    (tmp_path / "runs.db-acknowledged").write_text("no number")
    assert (0, "") == await reopen(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always on a full disk")
def test_writes_are_answered_though_the_record_beside_the_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_acknowledged, "_ONLY_FILE", 0)  # otherwise no link is followed
    (tmp_path / "runs.db-acknowledged").symlink_to("/dev/full")

    async def body() -> None:
        store = await write(tmp_path / "runs.db", rollouts=3)
        claims = await asyncio.gather(*(store.claim(worker="w") for _ in range(3)))
        assert ["ro-000.1", "ro-001.1", "ro-002.1"] == sorted(claim.attempt.attempt_id for (claim,) in claims)
        await store.close()

    asyncio.run(body())
    assert 1 == caplog.text.count("would go unnoticed")
    assert "No space left on device" in caplog.text


def test_error_of_a_disk_that_is_full_at_the_first_opening_is_not_hidden(tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="bounds the size of files")
    said, _ = spawn(FULL, url_of(tmp_path / "runs.db")).communicate(timeout=120)
    assert "failed with 'disk I/O error'" in said  # what SQLite says where a file may grow no further


async def test_store_whose_file_was_removed_takes_no_more_writes(tmp_path: Path) -> None:
    store = await write(tmp_path / "gone.db", rollouts=1)
    (tmp_path / "gone.db").unlink()
    with pytest.raises(StoreError, match=r"gone\.db was removed while this process used it"):
        await store.enqueue([Rollout(rollout_id="after", task=1)])
    await store.close()


async def test_store_of_a_relative_path_survives_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    store = SQLiteStore("sqlite:///runs.db")
    monkeypatch.chdir("/")
    await store.enqueue([Rollout(rollout_id="after", task=1)])
    await store.close()


async def test_removed_rollouts_are_no_lost_changes(tmp_path: Path) -> None:
    store = await write(tmp_path / "runs.db", rollouts=3)
    ids = [rollout.rollout_id for rollout in await store.rollouts(RolloutQuery())]
    await store.cancel(ids)
    await store.delete(ids)
    await store.close()
    assert (0, "") == await reopen(tmp_path / "runs.db")


@pytest.mark.parametrize("is_reopened", [True, False])
@pytest.mark.parametrize("limits", [{}, {"timeout_s": 20.0, "grace_s": 0.0}], ids=["lease", "time limit"])
async def test_clock_set_back_keeps_a_dead_lease_for_its_length_at_most(
    tmp_path: Path, limits: dict[str, float], is_reopened: bool
) -> None:
    now = [1_000_000.0]
    store = SQLiteStore(url_of(tmp_path / "runs.db"), clock=lambda: now[0])
    retry = RetryPolicy(max_attempts=3, **limits)
    await store.enqueue([Rollout(rollout_id="ro", task=1, retry=retry)])
    await store.claim(worker="dies", lease_s=600 if limits else 30)
    now[0] -= 86400
    if is_reopened:
        await store.close()
        store = SQLiteStore(url_of(tmp_path / "runs.db"), clock=lambda: now[0])
    assert [] == await store.claim(worker="w")
    now[0] += 19
    assert [] == await store.claim(worker="w")
    now[0] += 12
    (claim,) = await store.claim(worker="w")
    assert ("ro", 2) == (claim.rollout.rollout_id, claim.attempt.number)
    await store.close()


async def test_lease_of_a_live_worker_keeps_its_length_when_the_clock_is_set_back(tmp_path: Path) -> None:
    now = [1_000_000.0]
    store = SQLiteStore(url_of(tmp_path / "runs.db"), clock=lambda: now[0])
    await store.enqueue([Rollout(rollout_id="ro", task=1)])
    (claim,) = await store.claim(worker="lives", lease_s=30)
    now[0] += 10
    await store.renew([claim.attempt.attempt_id], lease_s=600)
    now[0] -= 86400
    assert [] == await store.claim(worker="w")
    (attempt,) = await store.attempts("ro")
    assert (now[0] + 600, now[0]) == (attempt.lease_until, attempt.started_at)
    now[0] += 599
    assert [claim.attempt.attempt_id] == await store.renew([claim.attempt.attempt_id], lease_s=600)
    await store.close()


def test_file_that_another_process_makes_at_the_same_moment_is_not_called_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "runs.db"
    asyncio.run(SQLiteStore(f"sqlite:///{path}").close())
    read, looks = _schema._version, list[int]()

    def version(connection: sqlite3.Connection, path: Path) -> int:
        looks.append(read(connection, path))
        return looks[-1] if len(looks) > 1 else 0  # the file was empty before it was locked

    monkeypatch.setattr(_schema, "_version", version)
    asyncio.run(SQLiteStore(f"sqlite:///{path}").close())

    assert [CURRENT, CURRENT] == looks[:2]
    assert "" == caplog.text


def test_newer_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    asyncio.run(SQLiteStore(url_of(path)).close())
    execute(path, f"UPDATE agl_schema SET version = {CURRENT + 1}")
    with pytest.raises(SchemaVersionError, match="pip install --upgrade"):
        SQLiteStore(url_of(path))


def test_unusable_files_are_refused_with_a_next_step(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("these are my notes, not a data base\n" * 50)
    with pytest.raises(StoreError, match="no SQLite file"):
        SQLiteStore(url_of(text))
    execute(tmp_path / "other.db", "CREATE TABLE music (title TEXT)")
    with pytest.raises(StoreError, match=r"another program.*music"):
        SQLiteStore(url_of(tmp_path / "other.db"))
    with pytest.raises(StoreError, match="cannot be created"):
        SQLiteStore(url_of(text / "runs.db"))
    with pytest.raises(StoreError, match="cannot be opened"):
        SQLiteStore(url_of(tmp_path))
    for url in ("sqlite://runs.db", "sqlite:///", "sqlite:///:memory:", "runs.db"):
        with pytest.raises(StoreError, match=r"sqlite:///runs\.db"):
            SQLiteStore(url)


@pytest.mark.parametrize("tail", ["?busy_s=60", "?key=/etc/key", "#old", "?"])
def test_url_with_options_is_refused_and_makes_no_file(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "runs.db"
    with pytest.raises(StoreError, match=f"has no options.*write {re.escape(url_of(path))}, or rename"):
        SQLiteStore(url_of(path) + tail)
    assert [] == list(tmp_path.iterdir())


def test_folder_may_have_the_characters_of_options_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "C# or not?" / "runs.db"
    asyncio.run(SQLiteStore(url_of(path)).close())
    assert path.exists()


async def test_locked_file_is_waited_for_then_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    store = SQLiteStore(url_of(path), busy_s=0.1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process"):
        await store.enqueue([Rollout(rollout_id="a", task=None)])
    other.execute("ROLLBACK")
    other.close()
    await store.enqueue([Rollout(rollout_id="a", task=None)])
    await store.close()


def test_write_begins_soon_after_another_process_ends_its_transaction(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def wait_after_end(store: SQLiteStore, name: str) -> float:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        write = asyncio.create_task(store.enqueue([Rollout(rollout_id=name, task=None)]))
        await asyncio.sleep(0.13)  # SQLite's own looks are 25 and 50 ms apart by then
        other.execute("ROLLBACK")
        begin = time.monotonic()
        await write
        other.close()
        return time.monotonic() - begin

    async def main() -> None:
        store = SQLiteStore(url_of(path))
        waits = [await wait_after_end(store, f"r{number}") for number in range(7)]
        assert statistics.median(waits) < 0.02
        await store.close()

    asyncio.run(main())


async def test_calls_that_wait_together_wait_once_for_a_locked_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    store = SQLiteStore(url_of(path), busy_s=0.5)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    begin = time.monotonic()
    calls = [store.enqueue([Rollout(rollout_id=f"r{at}", task=at)]) for at in range(60)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - begin < 15.0  # and not 60 times half a second
    assert {(StoreError, True)} == {(type(each), "another process" in str(each)) for each in answers}
    other.close()
    await store.close()


async def test_one_failure_in_a_shared_transaction_harms_no_other(tmp_path: Path) -> None:
    store = SQLiteStore(url_of(tmp_path / "runs.db"))
    enqueued = (store.enqueue([Rollout(rollout_id=f"r{at}", task=at)]) for at in range(50))
    refused = (store.finish([Outcome(attempt_id=f"x{at}.1", status="failed")]) for at in range(50))
    mixed = [each for pair in zip(enqueued, refused, strict=True) for each in pair]
    results = await asyncio.gather(*mixed, return_exceptions=True)
    assert 50 == sum(isinstance(each, StoreError) for each in results)
    assert 50 == len(await store.rollouts(RolloutQuery()))
    await store.close()


async def test_calls_of_a_refused_append_are_no_base_for_later_ones(tmp_path: Path) -> None:
    store = SQLiteStore(url_of(tmp_path / "runs.db"))
    await store.enqueue([Rollout(rollout_id="a", task=None)])
    await store.claim(worker="w")
    calls, _ = _conversation(4)
    spans = [
        Span(rollout_id="a", attempt_id="a.1", span_id=f"{at:016x}", name="chat", call=call)
        for at, call in enumerate(calls)
    ]
    await store.append_spans(spans[:1])
    too_far = Span(rollout_id="a", attempt_id="a.1", span_id="f" * 16, name="far", sequence=1 << 30)
    with pytest.raises(StoreError, match="no room"):
        await store.append_spans([spans[1], too_far])
    others = (store.append_spans([spans[2], too_far]), store.append_spans([spans[3]]))
    await asyncio.gather(*others, return_exceptions=True)
    assert [calls[0], calls[3]] == [span.call for span in await store.spans("a")]
    await store.close()


def test_call_and_conversation_stay_small(tmp_path: Path) -> None:
    empty = asyncio.run(size_of(tmp_path / "empty.db", []))
    single = asyncio.run(size_of(tmp_path / "single.db", [[_call(1000, 200, at)] for at in range(100)])) - empty
    assert single <= 100 * 10_000
    turns, unique = _conversation(50)
    chat = asyncio.run(size_of(tmp_path / "chat.db", [turns] * 3)) - empty
    assert chat <= 3 * 2 * unique


async def size_of(path: Path, attempts: list[list[ModelCall]]) -> int:
    """Return the size on disk of a store with these calls."""
    store = SQLiteStore(url_of(path))
    await store.enqueue([Rollout(rollout_id=f"r{at}", task=at) for at in range(len(attempts))])
    claims = await store.claim(worker="w", limit=100)
    for claim, calls in zip(claims, attempts, strict=True):
        where = {"rollout_id": claim.rollout.rollout_id, "attempt_id": claim.attempt.attempt_id}
        for at, call in enumerate(calls):
            await store.append_spans([Span(**where, span_id=f"{at:016x}", name="chat m", call=call)])
    await store.close()
    return path.stat().st_size


def _words(source: random.Random, tokens: int) -> str:
    """Return text of about ``tokens`` tokens, 4.5 characters each, from a vocabulary of 3,000 words."""
    text = " ".join(f"{source.randrange(3000) * 7919:x}" for _ in range(tokens))
    return text[: int(4.5 * tokens)]


def _call(prompt: int, response: int, seed: int) -> ModelCall:
    source = random.Random(seed)
    answer = {"role": "assistant", "content": _words(source, response)}
    return ModelCall(
        request_id=f"req-{seed}",
        dialect="chat",
        model="m",
        request={"model": "m", "messages": [{"role": "user", "content": _words(source, prompt)}]},
        response={"choices": [{"index": 0, "message": answer}]},
        prompt_ids=pack_ids(source.randrange(150_000) for _ in range(prompt)),
        response_ids=pack_ids(source.randrange(150_000) for _ in range(response)),
        logprobs=pack_floats(-source.random() for _ in range(response)),
    )


def _conversation(turns: int) -> tuple[list[ModelCall], int]:
    """Return a conversation's calls with about 200 new tokens per turn, and the size of all new tokens and text."""
    ids, messages, calls, unique = b"", [], [], 0
    for turn in range(turns):
        fresh = _call(100, 100, turn)
        question = fresh.request["messages"][0]
        answer = fresh.response["choices"][0]["message"]
        ids += fresh.prompt_ids
        messages.append(question)
        calls.append(
            ModelCall(
                request_id=fresh.request_id,
                dialect="chat",
                model="m",
                request={"messages": list(messages), "model": "m"},
                response=fresh.response,
                prompt_ids=ids,
                response_ids=fresh.response_ids,
                logprobs=fresh.logprobs,
            )
        )
        ids += fresh.response_ids
        messages.append(answer)
        unique += len(fresh.prompt_ids) + len(fresh.response_ids) + len(fresh.logprobs)
        unique += len(question["content"]) + len(answer["content"])
    return calls, unique


def execute(path: Path, *statements: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    rows = [connection.execute(statement).fetchall() for statement in statements]
    connection.commit()
    connection.close()
    return rows[-1]


def layout(path: Path) -> set[str]:
    rows = execute(path, "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
    return {str(name) for (name,) in rows}
