"""Experiments whose attempts run in workers on a Ray cluster."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RolloutQuery
from agl.errors import AglError, ConfigError
from agl_run import FitResult, Quiet, Trainer, load_config
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own sockets


def _runner(*, params: str = "max_workers = 2", more: str = "") -> str:
    return f'[runner]\nuse = "ray"\nconcurrency = 2\n{more}\n\n[runner.params]\n{params}\n'


def _trainer(given: Any) -> Trainer:
    return Trainer.from_config(load_config(given.file), folder=given.file.parent, progress=Quiet())


def _fit(given: Any) -> FitResult:
    return _trainer(given).fit()


async def _read_attempts(given: Any) -> list[str]:
    store = SQLiteStore(url=f"sqlite:///{given.file.parent / 'runs.db'}")
    try:
        rollouts = await store.rollouts(RolloutQuery())
        return [attempt.status for rollout in rollouts for attempt in await store.attempts(rollout.rollout_id)]
    finally:
        await store.close()


def _statuses(given: Any) -> list[str]:
    """Return the statuses of all attempts."""
    return asyncio.run(_read_attempts(given))


def _workers(ray: Any) -> list[dict[str, Any]]:
    from ray._private.state import actors  # the state API needs ray[default]

    found = [actor for actor in actors().values() if actor["ActorClassName"] == "WorkerActor"]
    return [actor for actor in found if actor["State"] != "DEAD"]


def test_attempts_run_in_workers_and_leave_none_behind(ray: Any, experiment: Any, tmp_path: Path) -> None:
    given = experiment(tmp_path, seconds=1.0, more=_runner())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_fit, given)
        wait_until(lambda: len(_workers(ray)) == 2 or running.done())
        result = running.result()
    assert (0, 1.0) == (result.failed, result.after)
    assert {"succeeded"} == set(_statuses(given))
    assert str(os.getpid()) not in given.processes
    wait_until(lambda: not _workers(ray))


def test_worker_that_is_killed_starts_again_and_every_rollout_is_done_once(
    ray: Any, experiment: Any, tmp_path: Path
) -> None:
    given = experiment(tmp_path, tasks=8, seconds=1.0, more=_runner(params="max_workers = 1"))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_fit, given)
        first = wait_until(lambda: given.processes)[0]
        os.kill(int(first), signal.SIGKILL)
        result = running.result()
    assert (0, 1.0) == (result.failed, result.after)
    statuses = _statuses(given)
    assert 9 <= statuses.count("succeeded") <= 10  # the tasks, and validations
    assert 1 <= statuses.count("lost") <= 2
    assert 2 == len(set(given.processes))


def test_workers_that_are_not_needed_stop(ray: Any, experiment: Any, tmp_path: Path) -> None:
    algorithm = '[[algorithm]]\nuse = "pacing"\ntunes = "style"\nparams = { steps = 2, work_s = 8 }\n\n'
    given = experiment(tmp_path, more=algorithm + _runner(params="max_workers = 2\nidle_s = 1"))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_fit, given)
        wait_until(lambda: given.processes)
        wait_until(lambda: not _workers(ray) and not running.done())
        assert running.result().steps == {"pacing": 2}
    assert len(set(given.processes)) > 1


def test_two_experiments_on_one_cluster_keep_apart(ray: Any, experiment: Any, tmp_path: Path) -> None:
    both = [
        experiment(tmp_path / name, seconds=0.5, more=_runner(params="max_workers = 1"), name=name)
        for name in ("one", "two")
    ]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(_fit, both))
    assert ["one", "two"] == [result.experiment for result in results]
    assert [0, 0] == [result.failed for result in results]
    assert set(both[0].processes).isdisjoint(both[1].processes)


def test_workers_run_attempts_in_processes_of_their_own(ray: Any, experiment: Any, tmp_path: Path) -> None:
    given = experiment(tmp_path, tasks=2, more=_runner(params='max_workers = 1\nrunner = "process"'))
    assert 0 == _fit(given).failed
    assert 2 <= len(set(given.processes))


def test_worker_that_cannot_join_ends_the_run_with_the_reason(ray: Any, experiment: Any, tmp_path: Path) -> None:
    given = experiment(tmp_path, more=_runner())
    trainer = _trainer(given)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(trainer.fit)
        (tmp_path / "agent.py").write_text("raise RuntimeError('broken on this machine')\n")
        with pytest.raises(AglError, match="broken on this machine"):
            running.result()


def test_worker_without_room_is_an_error_within_seconds(ray: Any, experiment: Any, tmp_path: Path) -> None:
    runner = _runner(params="wait_s = 1", more="resources = { custom = { desk = 2 } }")
    given = experiment(tmp_path / "never", more=runner)
    with pytest.raises(ConfigError, match=r"each worker asks for 0\.5 CPU, 2 desk, and the most that one machine"):
        _fit(given)
    holder = ray.remote(threading.Event).options(resources={"desk": 1}, num_cpus=0).remote()
    given = experiment(tmp_path / "later", more=runner.replace("desk = 2", "desk = 1"))
    with pytest.raises(
        ConfigError, match=r"no room within 1 s: each worker asks for .* 1 desk .*Wait until others end"
    ):
        _fit(given)
    ray.kill(holder)


def _run(given: Any, ray: Any) -> subprocess.Popen[str]:
    """Start ``agl run`` on the cluster, as a user would."""
    words = [sys.executable, "-m", "agl", "run", str(given.file), "--ray", ray.get_runtime_context().gcs_address]
    return subprocess.Popen(
        words,
        cwd=given.file.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_driver_that_ends_leaves_no_worker(number: int, code: int, ray: Any, experiment: Any, tmp_path: Path) -> None:
    given = experiment(tmp_path, tasks=4, seconds=2.0)
    process = _run(given, ray)
    wait_until(lambda: given.processes or process.poll() is not None)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert code == process.returncode, output
    wait_until(lambda: not _workers(ray))
    again = subprocess.run(
        [sys.executable, "-m", "agl", "run", str(given.file), "--resume", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 == again.returncode, again.stderr
    assert "succeeded" == max(_statuses(given), key=_statuses(given).count)
    if number == signal.SIGINT:
        assert "--resume --ray" in output
