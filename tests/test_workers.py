"""Workers elsewhere: real processes with homes and folders of their own, killed, cut off and misled."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agl.contracts import RolloutQuery
from agl.stores.sqlite import SQLiteStore

from .test_crash import check_end, wait_for_a_step

StartAgl = Callable[..., "subprocess.Popen[str]"]


def free_port() -> int:
    """A port that was free a moment ago."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def leave_to_workers(file: Path, port: int, *, more: str = "") -> str:
    """Let an experiment run no attempt itself and listen at ``port``; returns the gateway's URL."""
    text = file.read_text().replace("concurrency = 3", f"concurrency = 0{more}")
    file.write_text(f'{text}\n[gateway]\nparams = {{ host = "0.0.0.0", port = {port} }}\nadvertise = "127.0.0.1"\n')
    return f"http://127.0.0.1:{port}"


def elsewhere(file: Path, name: str) -> Path:
    """A copy of the experiment's files in another folder, without its data; returns the copy's experiment file."""
    folder = file.parent.parent / name
    folder.mkdir()
    for wanted in (file.name, "toy_agent.py"):
        if (file.parent / wanted).exists():
            shutil.copy(file.parent / wanted, folder)
    return folder / file.name


def workers_of(file: Path) -> set[str]:
    """Process ids of those who ran the experiment's attempts."""

    async def work() -> set[str]:
        store = SQLiteStore(f"sqlite:///{file.parent / 'runs' / 'toy.db'}")
        rollouts = await store.rollouts(RolloutQuery(experiment="toy", limit=10_000))
        attempts = [attempt for rollout in rollouts for attempt in await store.attempts(rollout.rollout_id)]
        await store.close()
        return {attempt.worker.split(":")[1] for attempt in attempts}

    return asyncio.run(work())


def end_of(process: "subprocess.Popen[str]", *, seconds: float = 120.0) -> tuple[str, str]:
    """What a process printed until it ended with status 0."""
    out, err = process.communicate(timeout=seconds)
    assert 0 == process.returncode, out + err
    return out, err


def test_workers_elsewhere_run_what_a_local_run_would(agl: StartAgl, experiment: Callable[..., Path]) -> None:
    file = experiment(steps=4)
    url = leave_to_workers(file, free_port())
    homes = [elsewhere(file, name) for name in ("first", "second")]
    early = agl(
        "worker", str(homes[0]), "--store", url, "--json", cwd=homes[0].parent, XDG_STATE_HOME=str(homes[0].parent)
    )
    trainer = agl("run", str(file), "--quiet", cwd=file.parent)
    late = agl("worker", str(homes[1]), "--store", url, "--concurrency", "2", cwd=homes[1].parent)
    _, err = end_of(trainer)
    out, _ = end_of(early)
    said, _ = end_of(late)

    assert "" == err
    events = [json.loads(line) for line in out.splitlines()]
    assert ["joined", "left", "finished"] == [event["event"] for event in events if event["event"] != "waiting"]
    assert "experiment 'toy' is finished" in said
    assert "async, 2 at once" in said
    assert workers_of(file) <= {str(early.pid), str(late.pid)}
    check_end(file, steps=4)
