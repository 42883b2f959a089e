"""An experiment whose gateway has a process of its own: killed, and killed with the trainer, nothing is lost."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl.contracts import RolloutQuery
from agl_inspect.records.state import load_algorithm, load_experiment, trained_rollouts
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import wait_until

from .conftest import PATIENT
from .test_crash import ROLLOUTS_PER_STEP, wait_for_a_step

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows does not pass a socket on")

StartAgl = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def apart(experiment: Callable[..., Path]) -> Callable[..., Path]:
    """Writes an experiment whose gateway has a process of its own; returns its file."""

    def write(**options: object) -> Path:
        file = experiment(agent=PATIENT, **options)
        text = file.read_text().replace("concurrency = 3", "concurrency = 3\nmax_attempts = 1")
        file.write_text(f"{text}\n[gateway]\nprocess = true\n")
        return file

    return write


def gateway_of(pid: int) -> int:
    """The gateway's process that a trainer has; 0 for none."""
    listing = subprocess.run(["ps", "-ww", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
    found = [int(one) for one, parent, args in rows if int(parent) == pid and "agl_gateway.processes.program" in args]
    return found[0] if found else 0


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def steps_of(file: Path) -> int:
    metrics = file.parent / "runs" / "toy" / "metrics.jsonl"
    return metrics.read_text().count('"sum"') if metrics.exists() else 0


def check_all_trained_once(file: Path, *, steps: int, attempts: int = 1) -> None:
    """Every rollout succeeded and trained once, and both calls that its agent had answers to are recorded."""

    async def work() -> None:
        store = SQLiteStore(f"sqlite:///{file.parent / 'runs' / 'toy.db'}")
        experiment = await load_experiment(store, "toy")
        assert experiment is not None
        assert "finished" == experiment.status
        state = await load_algorithm(store, "toy", 1, "counter")
        assert state is not None
        assert steps * ROLLOUTS_PER_STEP == state.state["sum"]
        rollouts = await store.rollouts(RolloutQuery(experiment="toy", limit=100_000))
        assert {"succeeded"} == {rollout.status for rollout in rollouts}
        trained = await trained_rollouts(store, "toy", 1, "counter")
        assert trained == {rollout.rollout_id for rollout in rollouts}
        assert steps * ROLLOUTS_PER_STEP == len(trained)
        for rollout in rollouts:
            if attempts:
                assert attempts == len(await store.attempts(rollout.rollout_id))
            spans = await store.spans(rollout.rollout_id, attempt_id=rollout.attempt_id)
            prompts = {call.prompt_ids for span in spans if (call := span.call) is not None and call.response_ids}
            assert 2 == len(prompts), rollout.rollout_id
        await store.close()

    asyncio.run(work())
    with closing(sqlite3.connect(file.parent / "runs" / "toy.db")) as db:
        assert [("ok",)] == db.execute("PRAGMA integrity_check").fetchall()


def test_gateway_killed_three_times_costs_no_rollout(agl: StartAgl, apart: Callable[..., Path]) -> None:
    file = apart(steps=12, pause_s=0.3)
    process = agl("run", str(file), cwd=file.parent)
    wait_for_a_step(file, process)
    draw = random.Random(1)
    for _ in range(3):
        pid = wait_until(lambda: gateway_of(process.pid) or process.poll() is not None)
        os.kill(pid, signal.SIGKILL)
        done = steps_of(file)
        wait_until(lambda done=done: steps_of(file) > done or process.poll() is not None)
        time.sleep(draw.uniform(0.0, 0.3))
    out, err = process.communicate(timeout=400)

    assert 0 == process.returncode, out + err
    assert 3 == (out + err).count("ended with -9; it is started again"), out + err
    assert "the gateway runs in a process of its own: 3 attempts at once" in out + err
    check_all_trained_once(file, steps=12)


def kill_both(process: "subprocess.Popen[str]", draw: random.Random) -> None:
    """Kill a trainer and its gateway, one after the other in random order, soon after the gateway has started."""
    pid = wait_until(lambda: gateway_of(process.pid) or process.poll() is not None)
    time.sleep(draw.uniform(0.5, 2.5))
    for one in draw.sample([pid, process.pid], 2):
        if not is_gone(one):
            os.kill(one, signal.SIGKILL)
        time.sleep(draw.choice([0.0, 0.2]))
    process.kill()
    process.communicate()


def test_trainer_and_gateway_killed_at_random_lose_nothing(agl: StartAgl, apart: Callable[..., Path]) -> None:
    file = apart(steps=10, pause_s=0.3)
    draw = random.Random(2)
    resume: tuple[str, ...] = ()
    for _ in range(3):
        kill_both(agl("run", str(file), "--quiet", *resume, cwd=file.parent), draw)
        resume = ("--resume",) if (file.parent / "runs" / "toy.db").exists() else ()
    process = agl("run", str(file), "--quiet", *resume, cwd=file.parent)
    out, err = process.communicate(timeout=400)

    assert 0 == process.returncode, out + err
    check_all_trained_once(file, steps=10, attempts=0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_gateway_ends_with_the_trainer(agl: StartAgl, apart: Callable[..., Path], number: signal.Signals) -> None:
    file = apart(steps=50, pause_s=0.3)
    process = agl("run", str(file), cwd=file.parent)
    wait_for_a_step(file, process)
    pid = gateway_of(process.pid)
    assert pid
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    began = time.monotonic()
    wait_until(lambda: is_gone(pid))

    assert time.monotonic() - began < 10
    if number == signal.SIGTERM:
        assert 130 == process.returncode, err
        assert "Traceback" not in err
        assert "stopped; everything up to the last step is kept" in err


def test_gateway_gets_a_process_beyond_the_load_that_the_settings_name(
    agl: StartAgl, experiment: Callable[..., Path]
) -> None:
    file = experiment(steps=1)
    told: list[str] = []
    for settings in ((), ("runner.concurrency=65",), ("gateway.process=false",)):
        words = [word for setting in settings for word in ("--set", setting)]
        process = agl("run", str(file), "--fresh", *words, cwd=file.parent)
        out, err = process.communicate(timeout=120)
        assert 0 == process.returncode, out + err
        told += [line for line in (out + err).splitlines() if "the gateway runs in" in line]

    assert [
        "the gateway runs in this process: 3 attempts at once, and it gets its own above 64",
        "the gateway runs in a process of its own: 65 attempts at once",
        "the gateway runs in this process, as [gateway] process = false says",
    ] == told


def test_gateway_of_workers_elsewhere_has_a_process(agl: StartAgl, experiment: Callable[..., Path]) -> None:
    file = experiment(steps=1)
    trainer = agl("run", str(file), "--set", "runner.concurrency=0", cwd=file.parent)
    wait_until(lambda: gateway_of(trainer.pid) != 0)
    worker = agl("worker", str(file), cwd=file.parent)
    out, err = trainer.communicate(timeout=120)
    worker.communicate(timeout=120)

    assert "the gateway runs in a process of its own: workers elsewhere run the attempts" in out + err
    assert (0, 0) == (trainer.returncode, worker.returncode), out + err


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("experiment.store=memory://", "gateway.process=true"), "the store is in the memory of this process"),
        (("gateway.process=true", "gateway.params.spool=off"), 'take away spool = "off"'),
        (("gateway.process=maybe",), 'write process = true, process = false, or process = "auto"'),
        (("gateway.use=none", "gateway.process=true"), 'are ignored with use = "none"'),
    ],
)
def test_check_refuses_what_cannot_be(
    experiment: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: tuple[str, ...],
    reason: str,
) -> None:
    file = experiment(steps=1)
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = [word for setting in settings for word in ("--set", setting)]
    done = CliRunner().invoke(cli, ["check", str(file), *words])
    sys.modules.pop("toy_agent", None)

    assert 1 == done.exit_code, done.output
    assert reason in " ".join(done.stderr.split())
