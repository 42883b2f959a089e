"""The forecast of ``agl check --forecast`` from a trial against the steps that then run, over 20 experiments.

Each experiment trains a random Qwen2 that is served in this process, with a rate so small that the policy stays what it
was. Experiments differ in model, tasks, group size, rollouts at once, updates, turns, tools that wait, the order in
which tasks are drawn, and in how far tasks and rollouts differ in length. For each, ``agl check --forecast`` runs its
trial, ``agl run`` sixteen steps, which are compared with the forecast: the tokens that a step computes and those that
it trains on, and from the second step on the seconds of its rollouts and updates. A bar is the number of experiments,
of 20, that keep a limit: 10 % of the tokens of a step, 25 % of its time, and 60 s for the plan.

The time of a forecast is that of the load under which its trial ran, so the bar on time holds on an idle machine.

Run alone: ``python -m benchmarks.bench_plan``; it needs agl-algo-torch and takes half an hour.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks._harness import Figure, table
from benchmarks.bench_verl import make_model

TOKENS, TIME, LIMIT_S = 0.10, 0.25, 60.0
STEPS, TASKS = 16, 128
"""Every step of 8 tasks trains on other ones, and the last ends a whole epoch, or the second one with 16 tasks.

The tokens of five such steps differ by 8 % from those of other five, whatever a forecast says.
"""

AGENT = '''
import random
import time
import zlib

import openai

with open("rounds.txt") as file:
    TURNS, WAITS, SPREAD = map(float, file.read().split())


def solve(task, llm):
    """Some turns, whose number and lengths depend on the task and on what the model says."""
    own = random.Random(task["n"])
    messages = [{"role": "user", "content": "word " * own.randint(1, int(SPREAD))}]
    said = ""
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        for turn in range(int(TURNS)):
            most = own.randint(4, 4 + int(SPREAD))
            found = client.chat.completions.create(model=llm.model, messages=messages, max_tokens=most)
            said = found.choices[0].message.content or ""
            if zlib.crc32(said.encode()) % 4 == 0:
                break
            if WAITS:
                time.sleep(WAITS)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    return float(zlib.crc32(said.encode()) % 2)
'''


@dataclass(frozen=True, kw_only=True)
class Case:
    """One experiment."""

    hidden: int = 128
    layers: int = 2
    tasks: int = 8
    group: int = 4
    at_once: int = 16
    turns: int = 2
    waits_s: float = 0.0
    spread: int = 16
    updates: int = 1
    epochs: int = 1

    def write(self, folder: Path, *, seed: int) -> None:
        """Write the experiment and its agent."""
        folder.mkdir()
        (folder / "planned_agent.py").write_text(AGENT)
        (folder / "rounds.txt").write_text(f"{self.turns} {self.waits_s} {self.spread}")
        (folder / "tasks.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(TASKS)))
        (folder / "experiment.toml").write_text(
            f"""
[experiment]
name = "planned"
seed = {seed}
agent = "planned_agent:solve"
store = "sqlite:///runs.db"
train = "tasks.jsonl"
[runner]
concurrency = {self.at_once}
[policy.llm]
use = "torch"
model = "../model-{self.hidden}-{self.layers}"
threads = 1
[[algorithm]]
use = "grpo"
tunes = "llm"
[algorithm.params]
steps = {STEPS}
tasks_per_step = {self.tasks}
group_size = {self.group}
updates_per_step = {self.updates}
epochs = {self.epochs}

[algorithm.params.optim]
lr = 1e-12

[algorithm.params.compute]
threads = 1
device = "cpu"
"""
        )


CASES = (
    Case(),
    Case(tasks=16),
    Case(tasks=4, group=8),
    Case(tasks=16, group=8, at_once=64),
    Case(hidden=256),
    Case(hidden=256, layers=4),
    Case(hidden=64, layers=4),
    Case(hidden=256, tasks=16, at_once=32),
    Case(turns=1),
    Case(turns=4),
    Case(turns=4, spread=48),
    Case(spread=4),
    Case(spread=48),
    Case(spread=64, tasks=16),
    Case(waits_s=0.1),
    Case(waits_s=0.3, turns=3),
    Case(at_once=4),
    Case(at_once=64, tasks=16),
    Case(updates=2, epochs=2),
    Case(hidden=256, updates=4, turns=3, spread=32),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The forecast of one experiment and what its steps took: shares by which the forecast is off, and seconds."""

    computed: float
    trained: float
    collect: float
    update: float
    whole: float
    plan_s: float
    sure: float

    @property
    def tokens(self) -> float:
        """The larger error of the tokens of a step."""
        return max(abs(self.computed), abs(self.trained))


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where agl-algo-torch is not installed."""
    if not find_spec("agl_algo_torch"):
        return []
    cases = CASES[:2] if quick else CASES
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(cases):
            found.append(compare(case, Path(name), number))
            print(f"    {case}: {found[-1]}", flush=True)
    kept = [
        ("tokens of a step within 10 %", sum(one.tokens <= TOKENS for one in found)),
        ("time of a step within 25 %", sum(abs(one.whole) <= TIME for one in found)),
        ("plan in at most 60 s", sum(one.plan_s <= LIMIT_S for one in found)),
    ]
    count = len(cases)
    counted = [
        Figure(name=f"{name}, of {count}", value=float(value), unit="experiments", bar=float(count))
        for name, value in kept
    ]
    return [
        *counted,
        Figure(
            name="error of a step's tokens", value=median(one.tokens for one in found), unit="share", better="lower"
        ),
        Figure(
            name="error of a step's time", value=median(abs(one.whole) for one in found), unit="share", better="lower"
        ),
        Figure(
            name="agl check --forecast, with its trial",
            value=median(one.plan_s for one in found),
            unit="s",
            better="lower",
        ),
    ]


def compare(case: Case, root: Path, number: int) -> Outcome:
    """Plan an experiment, run it, and compare."""
    model = root / f"model-{case.hidden}-{case.layers}"
    if not model.exists():
        make_model(model, hidden=case.hidden, layers=case.layers)
    folder = root / f"case-{number}"
    case.write(folder, seed=number)
    started = time.perf_counter()
    plan = told(folder, "plan", "experiment.toml", "--json")["algorithms"][0]
    plan_s = time.perf_counter() - started
    agl(folder, "run", "experiment.toml", "--quiet")
    rows = rows_of(folder)
    steps: dict[int, dict[str, float]] = {}
    for metric in told(folder, "metrics", "planned", "--json", "--store", "runs.db"):
        steps.setdefault(metric["step"], {})[metric["name"]] = metric["value"]
    later = [steps[step] for step in sorted(steps) if step > 1]
    real_collect, real_update = (fmean(step[name] for step in later) for name in ("collect_s", "update_s"))
    collect, update = plan["step"]["collect_s"]["mean"], plan["update_s"] or 0.0
    return Outcome(
        computed=off(plan["step"]["row_tokens"]["mean"], sum(tokens for tokens, _ in rows) / STEPS),
        trained=off(plan["step"]["trained_tokens"]["mean"], sum(trained for _, trained in rows) / STEPS),
        collect=off(collect, real_collect),
        update=off(update, real_update),
        whole=off(collect + update, real_collect + real_update),
        plan_s=plan_s,
        sure=plan["uncertainty"] or 0.0,
    )


def rows_of(folder: Path) -> list[tuple[int, int]]:
    """Return the tokens of each training row of all steps, and how many of them train."""
    words = ("--format", "rows", "--store", "runs.db", "--experiment", "planned", "--mode", "train")
    written = agl(folder, "data", "export", *words)
    rows = [json.loads(line) for line in written.splitlines()]
    return [(len(row["ids"]), sum(row["mask"])) for row in rows]


def off(forecast: float, real: float) -> float:
    """The error of a forecast as a share of what came."""
    return forecast / real - 1


def told(folder: Path, *words: str) -> Any:
    """Return the JSON that a command prints."""
    return json.loads(agl(folder, *words))


def agl(folder: Path, *words: str) -> str:
    """Run a command of agl; raises ``CalledProcessError`` when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "agl", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    print(table(run(quick=False)))
