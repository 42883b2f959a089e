"""``kill -9`` at any point: the resumed run ends as an unbroken one does, and pays for no rollout twice."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RolloutQuery
from agl.stores.sqlite import SQLiteStore
from agl_testing.prompt_world import noisy
from agl_testing.prompt_world_optimizer import ScriptedOptimizer
from agl_testing.prompt_world_run import model_server

PROGRAM = """
import sys
from pathlib import Path
import agl
from agl_testing.prompt_world import noisy
from agl_testing.prompt_world_run import HIDDEN, order_agent, order_reward

folder, base_url, latency, use = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
world = noisy(2)
trainer = agl.Trainer(
    algorithm=agl.Algorithm(
        use,
        tunes=tuple(world.seeds()),
        optimizer={"base_url": base_url, "model": "editor"},
        budget=240,
    ),
    name="orders", store="sqlite:///runs.db", folder=folder, n_runners=4, hidden=HIDDEN, validation_limit=1,
    initial_resources=dict(world.seeds()), rewards=(order_reward(world),),
)
is_old = (folder / "runs.db").exists()
trainer.fit(order_agent(world, latency_s=latency), world.train, world.val, resume=is_old)
"""


def start(folder: Path, base_url: str, *, latency_s: float, use: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(folder), base_url, str(latency_s), use]
    environment = {**os.environ, "AGL_PLUGINS_STRICT": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: "subprocess.Popen[str]") -> None:
    out, err = process.communicate(timeout=180)
    assert 0 == process.returncode, out + err


def what_was_left(folder: Path, use: str) -> tuple[Any, Any, int, int]:
    """Result, lineage, and how many rollouts and attempts the algorithm paid for."""
    workdir = folder / "runs/orders/run-1" / use
    result = json.loads((workdir / "result.json").read_text())
    lineage = [json.loads(line) for line in (workdir / "lineage.jsonl").read_text().splitlines()]

    async def count() -> tuple[int, int]:
        store = SQLiteStore(f"sqlite:///{folder / 'runs.db'}")
        rollouts = await store.rollouts(RolloutQuery(experiment="orders", limit=100_000))
        ours = [rollout for rollout in rollouts if rollout.metadata.get("algorithm") == use]
        await store.close()
        return len(ours), sum(rollout.attempts for rollout in ours)

    return result, lineage, *asyncio.run(count())


@pytest.mark.parametrize("use", ["apo", "random"])
def test_killed_run_ends_as_an_unbroken_one_and_pays_nothing_twice(tmp_path: Path, use: str) -> None:
    draw = random.Random(5)
    with model_server(noisy(2), ScriptedOptimizer(delay_s=0.02)) as server:
        finish(start(tmp_path / "whole", server.base_url, latency_s=0.0, use=use))
        hits = 0
        for _ in range(4):
            process = start(tmp_path / "parts", server.base_url, latency_s=0.02, use=use)
            time.sleep(draw.uniform(1.2, 2.5))
            hits += process.poll() is None
            process.kill()
            process.communicate()
            if not hits:
                break
        if hits == 4:
            finish(start(tmp_path / "parts", server.base_url, latency_s=0.0, use=use))
    assert hits
    whole, parts = (what_was_left(tmp_path / name, use) for name in ("whole", "parts"))
    assert whole[:2] == parts[:2]
    assert whole[2] == parts[2] <= 240
    assert parts[3] <= parts[2] + 4 * 4  # an attempt that was running when the process died runs again
