"""Trainers that die, and come back late or from elsewhere: no rollout fails for it, unless it is what ends them."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from agl.schemas import Attempt
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import wait_until

from .conftest import AGENT
from .test_crash import check_end
from .test_workers import store_of, tried

StartAgl = Callable[..., subprocess.Popen[str]]

RETURNS = 3

KILLER = f"import os\nimport signal\n{AGENT}".replace(
    "    with httpx2",
    "    if task['question'] == 'what is 4?':\n        os.kill(os.getpid(), signal.SIGKILL)\n    with httpx2",
)
"""An agent that ends the process that runs it on one of its tasks."""


def pass_time(file: Path, *, seconds: float) -> None:
    """Let the store see a later time: it decides the attempts whose leases have lapsed by then."""

    async def work() -> None:
        store = SQLiteStore(f"sqlite:///{store_of(file)}", clock=lambda: time.time() + seconds)
        await store.cursor()
        await store.close()

    asyncio.run(work())


def running(file: Path) -> list[Attempt]:
    """The attempts that run."""
    found = tried(file) if store_of(file).exists() else []
    return [attempt for _, attempts in found for attempt in attempts if attempt.status == "running"]


def test_trainer_that_comes_back_late_again_and_again_loses_no_rollout(
    agl: StartAgl, experiment: Callable[..., Path], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    wait = f"    while os.path.exists({str(gate)!r}):\n        time.sleep(0.05)\n"
    file = experiment(
        steps=3, agent=f"import os\nimport time\n{AGENT}".replace("    with httpx2", f"{wait}    with httpx2")
    )
    file.write_text(file.read_text().replace("concurrency = 3", "concurrency = 3\nmax_attempts = 1"))
    resume: tuple[str, ...] = ()
    for _ in range(RETURNS):
        trainer = agl("run", str(file), "--quiet", *resume, cwd=file.parent)
        wait_until(lambda: len(running(file)) == 3, every_s=0.1)
        trainer.kill()
        trainer.communicate()
        pass_time(file, seconds=60)
        resume = ("--resume",)
    gate.unlink()
    out, err = agl("run", str(file), "--quiet", "--resume", cwd=file.parent).communicate(timeout=120)

    assert "failed" not in out + err
    check_end(file, steps=3)
    assert RETURNS == max(rollout.losses for rollout, _ in tried(file))
    assert {0} == {rollout.failures for rollout, _ in tried(file)}


def test_rollout_that_ends_its_trainer_every_time_is_named_and_the_run_goes_on(
    agl: StartAgl, experiment: Callable[..., Path]
) -> None:
    file = experiment(steps=1, agent=KILLER)
    file.write_text(file.read_text().replace("concurrency = 3", "concurrency = 3\nmax_losses = 1"))
    ends: list[int] = []
    resume: tuple[str, ...] = ()
    while not ends or (ends[-1] != 0 and len(ends) < 10):
        trainer = agl("run", str(file), "--quiet", *resume, cwd=file.parent)
        _, err = trainer.communicate(timeout=120)
        ends.append(trainer.returncode)
        resume = ("--resume",)

    lost = [rollout for rollout, _ in tried(file) if rollout.status != "succeeded"]
    assert {"what is 4?"} == {rollout.task["question"] for rollout in lost}
    assert {("failed", 2)} == {(rollout.status, rollout.losses) for rollout in lost}
    assert ([-9] * (len(ends) - 1) + [0], 2) == (ends, len(lost))
    assert len(ends) in (4, 5)  # they share their first end, or do not
    assert "agl.Quarantined: the rollout lost its worker in 2 of 3 attempts and is not tried again: it may" in err
    assert f"agl show {lost[0].rollout_id}" in err
