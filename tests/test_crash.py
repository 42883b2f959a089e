"""``kill -9`` of the trainer or of its worker processes at random points: nothing is lost, nothing trained twice."""

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agl.contracts import RolloutQuery
from agl.schemas import to_json
from agl_inspect.records.state import load_algorithm, load_experiment, trained_rollouts
from agl_testing.waiting import wait_until

from .installation import open_store

StartAgl = Callable[..., "subprocess.Popen[str]"]

USER_KEY = "sk-the-users-own-key-0123456789"
STEPS = 10
ROLLOUTS_PER_STEP = 6


def check_end(file: Path, *, steps: int, url: str = "") -> None:
    """The finished experiment trained every rollout exactly once, and the sum is that of an unbroken run."""

    async def work() -> None:
        store = open_store(url or f"sqlite:///{file.parent / 'runs' / 'toy.db'}")
        experiment = await load_experiment(store, "toy")
        assert experiment is not None
        assert "finished" == experiment.status
        state = await load_algorithm(store, "toy", 1, "counter")
        assert state is not None
        trained = await trained_rollouts(store, "toy", 1, "counter")
        rollouts = await store.rollouts(RolloutQuery(experiment="toy", limit=100_000))
        assert {} == {
            rollout.rollout_id: [(each.status, each.error) for each in await store.attempts(rollout.rollout_id)]
            for rollout in rollouts
            if rollout.status != "succeeded"
        }
        assert steps * ROLLOUTS_PER_STEP == len(trained)
        assert trained == {rollout.rollout_id for rollout in rollouts}
        assert {"step": steps, "sum": float(len(trained)), "tokens": state.state["tokens"]} == state.state
        tokens = 0
        for rollout in rollouts:
            spans = await store.spans(rollout.rollout_id)
            text = to_json(spans)
            assert USER_KEY.encode() not in text
            assert b"agl_Wy" not in text, "an attempt token, which starts like this, reached the store"
            calls = [span.call for span in spans if span.call is not None and span.call.response_ids]
            assert 2 == len(calls), rollout.rollout_id
            tokens += sum(call.response_len for call in calls)
        assert tokens == state.state["tokens"]
        await store.close()

    asyncio.run(work())


def run_with_kills(agl: StartAgl, file: Path, *, kills: int, seed: int) -> int:
    """Run to the end, killing the trainer ``kills`` times at random moments; returns how many kills hit it alive."""
    file.write_text(file.read_text().replace("concurrency = 3", "concurrency = 3\nmax_attempts = 1"))
    rng = random.Random(seed)
    hits = 0
    resume: tuple[str, ...] = ()
    for _ in range(kills):
        process = agl("run", str(file), "--quiet", *resume, cwd=file.parent)
        time.sleep(rng.uniform(0.2, 2.2))
        if process.poll() is None:
            hits += 1
        process.kill()
        process.communicate()
        resume = ("--resume",) if (file.parent / "runs" / "toy.db").exists() else ()
    process = agl("run", str(file), "--quiet", "--resume", cwd=file.parent)
    out, err = process.communicate(timeout=240)
    assert 0 == process.returncode, out + err
    return hits


def test_trainer_killed_at_random_points_trains_every_rollout_once(
    agl: StartAgl, experiment: Callable[..., Path]
) -> None:
    file = experiment(steps=STEPS, pause_s=0.5)

    hits = run_with_kills(agl, file, kills=6, seed=1)

    assert hits >= 5
    check_end(file, steps=STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_trainer_killed_very_often(agl: StartAgl, experiment: Callable[..., Path], seed: int) -> None:
    file = experiment(steps=100, pause_s=0.4)
    run_with_kills(agl, file, kills=60, seed=seed)
    check_end(file, steps=100)


def test_worker_processes_killed_at_random_points_cost_only_their_attempt(
    agl: StartAgl, experiment: Callable[..., Path]
) -> None:
    rng = random.Random(3)
    file = experiment(steps=15, runner="process", pause_s=0.2)
    file.write_text(
        file.read_text().replace("concurrency = 3", 'concurrency = 3\nretry_on = ["failed"]\nmax_attempts = 9')
    )
    process = agl("run", str(file), "--quiet", cwd=file.parent)
    killed = 0
    wait_for_a_step(file, process)
    while process.poll() is None and killed < 6:
        time.sleep(rng.uniform(0.1, 0.4))
        children = children_of(process.pid)
        if children:
            killed += kill(rng.choice(children))
    out, err = process.communicate(timeout=400)
    assert 0 == process.returncode, out + err
    assert killed >= 5
    check_end(file, steps=15)


def test_interrupt_finishes_cleanly_and_says_how_to_resume(agl: StartAgl, experiment: Callable[..., Path]) -> None:
    file = experiment(steps=8, pause_s=0.2)
    process = agl("run", str(file), cwd=file.parent)
    wait_for_a_step(file, process)
    process.terminate()
    out, err = process.communicate(timeout=30)

    assert 130 == process.returncode, out + err
    assert f"agl run {file} --resume" in err
    assert "Traceback" not in err

    again = agl("run", str(file), "--resume", "--set", "algorithm.counter.params.pause_s=0", cwd=file.parent)
    out, err = again.communicate(timeout=120)
    assert 0 == again.returncode, out + err
    check_end(file, steps=8)


def test_second_trainer_is_refused_while_the_first_runs(agl: StartAgl, experiment: Callable[..., Path]) -> None:
    file = experiment(steps=50, pause_s=0.3)
    first = agl("run", str(file), "--quiet", cwd=file.parent)
    wait_for_a_step(file, first)
    second = agl("run", str(file), "--resume", cwd=file.parent)
    _, err = second.communicate(timeout=30)
    first.kill()
    first.communicate()

    assert 1 == second.returncode
    assert f"process {first.pid} runs this experiment already" in err


def wait_for_a_step(file: Path, process: "subprocess.Popen[str]") -> None:
    """Return once the experiment has finished a step, or the process has ended."""
    metrics = file.parent / "runs" / "toy" / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size))


def children_of(pid: int) -> list[int]:
    """The worker children of a process, and their keepers."""
    listing = subprocess.run(
        ["ps", "-ww", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    ours = [(int(row[0]), int(row[1])) for row in rows if "agl_run.runners.child" in row[2]]
    keepers = [one for one, parent in ours if parent == pid]
    return [*keepers, *(one for one, parent in ours if parent in keepers)]


def kill(pid: int) -> int:
    """Kill a process; 1 if it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1
