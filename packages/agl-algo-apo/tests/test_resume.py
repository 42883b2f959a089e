"""``kill -9`` at any point: the resumed run ends like an uninterrupted one, and pays for no rollout twice."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RolloutQuery
from agl_inspect.records.state import load_algorithm
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import ModelRequest, Step
from worlds.prompts import noisy
from worlds.prompts_optimizer import ScriptedOptimizer
from worlds.prompts_run import model_server

pytestmark = pytest.mark.long

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import agl
from agl.algorithms import algorithm
from worlds.prompts import noisy
from worlds.prompts_run import HIDDEN, order_agent, order_reward

folder, base_url, use, last = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
params = json.loads(sys.argv[5])
world = noisy(2)
seeds = dict(world.seeds())
if params.pop("has_messages", False):
    head = {"role": "system", "content": "Help."}
    turns = {name: [head, {"role": "user", "content": prompt.template}] for name, prompt in seeds.items()}
    seeds = {name: agl.schemas.JsonResource(value=value) for name, value in turns.items()}

def search(use, **params):
    params = {"optimizer": {"base_url": base_url, "model": "editor"}, "budget": 240, **params}
    return algorithm(use, **params)

searches = [search(use, tunes=tuple(world.seeds()), **params)]
if "source" in params:
    seeds["other_prompt"] = agl.PromptTemplate(template="Nobody reads this.")
    searches.insert(0, search("apo", name=params["source"], tunes="other_prompt", budget=100))

def count(rollout):
    with open(folder / "started.txt", "a") as file:
        file.write(rollout.rollout_id + "\\n")
    if rollout.metadata.get("algorithm") == use and len(open(folder / "started.txt").readlines()) >= last > 0:
        os.kill(os.getpid(), signal.SIGKILL)

trainer = agl.Trainer(
    algorithm=searches, name="orders", store="sqlite:///runs.db", folder=folder, n_runners=4, hidden=HIDDEN,
    validation_limit=1, initial_resources=seeds, rewards=(order_reward(world),),
)
is_old = (folder / "runs.db").exists()
trainer.fit(order_agent(world, latency_s=0.002, fault=count), world.train, world.val, resume=is_old)
"""


class Assassin(ScriptedOptimizer):
    """An optimiser that, once, kills the asking process at that process's ``last`` question."""

    def __init__(self) -> None:
        super().__init__()
        self.victim: subprocess.Popen[str] | None = None
        self.last = 0

    def respond(self, request: ModelRequest) -> Step:
        """Answer a request of the optimiser or of the agent."""
        self.last -= 1
        if self.last == 0 and self.victim is not None:
            self.victim.kill()
        return super().respond(request)


def start(folder: Path, base_url: str, *, use: str, last: int = 0, **params: Any) -> "subprocess.Popen[str]":
    """Start the program, which kills itself at the start of its ``last`` rollout; 0 for never."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(folder), base_url, use, str(last), json.dumps(params)]
    root = str(Path(__file__).parents[3])  # where `worlds` is
    environment = {**os.environ, "AGL_PLUGINS_STRICT": "1", "PYTHONPATH": root}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def end(process: "subprocess.Popen[str]", *, code: int) -> None:
    out, err = process.communicate(timeout=180)
    assert code == process.returncode, out + err


def what_was_left(folder: Path, use: str) -> tuple[Any, Any, int, int]:
    """Return result, lineage, and the numbers of rollouts and attempts that the algorithm paid for."""
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


@pytest.mark.parametrize(
    ("use", "params"),
    [
        ("apo", {"demonstrations": {"most": 3}}),
        ("apo", {"demonstrations": {"most": 3}, "has_messages": True}),
        ("random", {}),
    ],
)
def test_killed_run_ends_as_an_unbroken_one_and_pays_nothing_twice(
    tmp_path: Path, use: str, params: dict[str, Any]
) -> None:
    script = Assassin()
    with model_server(noisy(2), script) as server:
        end(start(tmp_path / "whole", server.base_url, use=use, **params), code=0)
        whole = what_was_left(tmp_path / "whole", use)
        in_the_final_measurement = whole[2] - 8
        end(start(tmp_path / "parts", server.base_url, use=use, last=20, **params), code=-9)
        script.victim, script.last = start(tmp_path / "parts", server.base_url, use=use, **params), 5
        end(script.victim, code=-9)
        for last in (130, in_the_final_measurement):
            end(start(tmp_path / "parts", server.base_url, use=use, last=last, **params), code=-9)
        end(start(tmp_path / "parts", server.base_url, use=use, **params), code=0)
    parts = what_was_left(tmp_path / "parts", use)
    assert whole[:2] == parts[:2]
    assert bool(params) == any(row.get("operator") == "demonstrate" for row in whole[1])
    assert whole[2] == parts[2] <= 240
    # Four attempts that ran when a process died run again, and as many that had ended and were not written yet.
    assert parts[3] <= parts[2] + 4 * (4 + 4)


def progress_of(folder: Path, use: str) -> dict[str, Any]:
    """Return the counters in a search's last saved state."""

    async def read() -> Any:
        store = SQLiteStore(f"sqlite:///{folder / 'runs.db'}")
        saved = await load_algorithm(store, "orders", 1, use)
        await store.close()
        return saved.state["progress"]

    return asyncio.run(read())


def test_killed_search_with_a_source_goes_on_and_reads_no_step_of_it_again(tmp_path: Path) -> None:
    with model_server(noisy(2), ScriptedOptimizer()) as server:

        def run(folder: str, *, code: int = 0, **params: Any) -> None:
            params |= {"source": "payer", "gradient_batch_size": 2, "branch_factor": 1}
            end(start(tmp_path / folder, server.base_url, use="apo", **params), code=code)

        run("whole", budget=160)
        whole = what_was_left(tmp_path / "whole", "apo")
        everything = len((tmp_path / "whole/started.txt").read_text().splitlines())
        run("parts", budget=160, last=everything - 75, code=-9)
        assert {"payer": 4} == progress_of(tmp_path / "parts", "apo")["shared_steps"]
        run("parts", budget=160)
        assert whole[:3] == what_was_left(tmp_path / "parts", "apo")[:3]
        run("parts", budget=240)
        assert whole[2] < what_was_left(tmp_path / "parts", "apo")[2] <= 240
