"""Long runs: actors are killed again and again, and default times pass in full."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from agl.contracts import Recording, RolloutQuery
from agl.errors import AglError
from agl.stores import read_recordings
from agl_run import FitResult, Quiet, Trainer, load_config
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own sockets
]

KILLS = 50
STEPS = 10


def _algorithm(params: str, resources: str = "") -> str:
    return f'[[algorithm]]\nuse = "pacing"\ntunes = "style"\nparams = {{ {params} }}\n{resources}\n'


def _fit(given: Any, **options: Any) -> FitResult:
    config = load_config(given.file)
    return Trainer.from_config(config, folder=given.file.parent, progress=Quiet()).fit(**options)


def _actors(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    from ray._private.state import actors  # the state API asks a dashboard

    found = [actor for actor in actors().values() if actor["ActorClassName"] in kinds]
    return [actor for actor in found if actor["State"] == "ALIVE" and actor["Pid"]]


async def _read(url: str) -> list[Recording]:
    store = SQLiteStore(url=url)
    try:
        return [recording async for recording in read_recordings(store, RolloutQuery(), spans="none")]
    finally:
        await store.close()


class _Run:
    """An experiment that runs in a thread, and is resumed when the algorithm's process was killed."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._pool = ThreadPoolExecutor(1)
        self.resumed = 0
        self._running: Future[FitResult] = self._pool.submit(_fit, given)

    def is_over(self) -> bool:
        """Return true once the experiment has ended on its own."""
        if not self._running.done():
            return False
        error = self._running.exception()
        if error is None:
            return True
        assert isinstance(error, AglError)
        assert re.search("process of the algorithm .* ended", str(error)), error
        self.resumed += 1
        self._running = self._pool.submit(_fit, self._given, resume=True)
        return False

    def result(self) -> FitResult:
        wait_until(self.is_over, within_s=1800)
        return self._running.result()

    def close(self) -> None:
        self._pool.shutdown()


def _kill_one(run: _Run, given: Any, draw: random.Random, seen: set[int]) -> str:
    """Kill a process once an attempt has begun since the last kill; return its kind, or ``""`` if the run has ended."""
    began = len(given.processes)

    def fresh() -> list[dict[str, Any]] | str:
        if run.is_over():
            return "over"
        if len(given.processes) == began:
            return []
        time.sleep(draw.uniform(0.0, 1.5))
        return [actor for actor in _actors(("WorkerActor", "AlgorithmHost")) if actor["Pid"] not in seen]

    found = wait_until(fresh, within_s=600)
    if isinstance(found, str):
        return ""
    victim = draw.choice(found)
    seen.add(victim["Pid"])
    os.kill(victim["Pid"], signal.SIGKILL)
    return str(victim["ActorClassName"])


def test_any_actor_is_killed_fifty_times_and_every_rollout_is_finished_once(
    ray: Any, experiment: Any, tmp_path: Path
) -> None:
    resources = "\n[algorithm.resources]\nnum_cpus = 0.5\n"
    params = "max_workers = 2\nmin_workers = 2\nwait_s = 60\n"
    runner = f'[runner]\nuse = "ray"\nconcurrency = 2\n\n[runner.params]\n{params}'
    more = _algorithm(f"steps = {STEPS}, work_s = 0.2", resources) + runner
    draw, seen = random.Random(0), set[int]()
    killed: Counter[str] = Counter()
    for number in count():
        given = experiment(tmp_path / str(number), tasks=2, seconds=1.5, more=more, name=f"run-{number}")
        with closing(_Run(given)) as run:
            while killed.total() < KILLS and (kind := _kill_one(run, given, draw, seen)):
                killed[kind] += 1
            assert {"pacing": STEPS} == run.result().steps
        _check_trained(given, asyncio.run(_read(f"sqlite:///{given.file.parent / 'runs.db'}")))
        print(f"run {number}: killed {dict(killed)} so far, continued {run.resumed} times")
        if killed.total() == KILLS:
            return


def _check_trained(given: Any, recordings: list[Recording]) -> None:
    """Check that each rollout succeeded once and was trained only in the step that requested it."""
    succeeded = {
        recording.rollout.rollout_id: [attempt.status for attempt in recording.attempts].count("succeeded")
        for recording in recordings
    }
    assert {1} == set(succeeded.values())
    notes = [json.loads(line) for line in (given.file.parent / "notes.jsonl").read_text().splitlines()]
    trained = {note["step"]: set(note["trained"]) for note in notes}
    assert all(set(note["trained"]) == trained[note["step"]] for note in notes)  # a step that is repeated
    assert list(range(1, STEPS + 1)) == sorted(trained)
    assert 2 * STEPS == len(set.union(*trained.values()))
    assert set.union(*trained.values()) <= set(succeeded)


def test_idle_cluster_has_no_worker_after_a_minute(ray: Any, experiment: Any, tmp_path: Path) -> None:
    runner = '[runner]\nuse = "ray"\nconcurrency = 2\n\n[runner.params]\nwait_s = 60\n'
    given = experiment(tmp_path, more=_algorithm("steps = 1, work_s = 90") + runner)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_fit, given)
        wait_until(lambda: (tmp_path / "notes.jsonl").exists() or len(given.processes) >= 2)
        wait_until(lambda: _actors(("WorkerActor",)))
        wait_until(lambda: not _actors(("WorkerActor",)), every_s=0.2)
        seconds = time.time() - given.seen.stat().st_mtime  # since the last attempt began
        assert not running.done()
        assert 0 == running.result().failed
    print(f"no worker {seconds:.1f} s after the last attempt")
    assert 40 < seconds < 60


def test_auto_starts_a_cluster_that_ends_with_the_run(experiment: Any, tmp_path: Path) -> None:
    given = experiment(tmp_path)
    with TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True) as folder:  # short, for sockets
        done = subprocess.run(
            [sys.executable, "-m", "agl", "run", str(given.file), "--ray", "auto"],
            cwd=tmp_path,
            env={**os.environ, "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert 0 == done.returncode, done.stderr
        assert "recorded 6 rollouts, 0 failed, mean reward 1.000" in done.stdout
        wait_until(lambda: not _processes_with(folder))


def _processes_with(text: str) -> list[str]:
    found: list[str] = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found
