"""``python -m benchmarks.imported_runs [--seed N]``: what 1,000 imported runs alone teach the SQL example.

The example's writer first imitates its careless teacher, as in ``examples/sql``: it has the skill and a bad habit.
Then come 1,000 runs that somebody else recorded: four answers to each of 250 training questions, a third of them
right, each with its reward, as a file of OpenAI chats. ``agl data import`` puts them into an empty store, ``agl data
export`` writes the right ones for ``sft`` and the pairs for ``dpo``, and the held-out reward is measured before and
after each. No rollout is collected for training, and no token ids were
recorded. It needs the environment of the example.
"""

import argparse
import asyncio
import importlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from agl.contracts import RolloutQuery
from agl_store_sqlite import SQLiteStore

EXAMPLE = Path(__file__).parent.parent / "examples" / "sql"
TASKS, SAMPLES, RIGHT = 250, 4, 1 / 3
STEPS = 5
"""Steps of each algorithm that learns from the runs, after which a validation follows."""

STAGES = {5: "before", 10: "after sft", 15: "after dpo"}
LEARNERS = f"""
[[algorithm]]
use = "sft"
name = "sft-imported"
tunes = "main_llm"

[algorithm.params]
data = "out/good.jsonl"
updates = {STEPS * 20}
batch_size = 24
updates_per_step = 20

[algorithm.params.optim]
lr = 1e-3

[algorithm.params.compute]
threads = 1

[[algorithm]]
use = "dpo"
name = "dpo-imported"
tunes = "main_llm"

[algorithm.params]
data = "out/pairs.jsonl"
steps = {STEPS}

[algorithm.params.optim]
lr = 3e-5

[algorithm.params.compute]
threads = 1

"""


def record(folder: Path, *, seed: int) -> None:
    """Write the runs of a stranger as chats: right queries, guessed columns, and queries with a slip."""
    sys.path.insert(0, str(folder))
    example: Any = importlib.import_module("make_data")
    rng = random.Random(f"{seed}/imported")
    lines: list[dict[str, Any]] = []
    for question in example.pool(folder / "out/data", seed=seed)[:TASKS]:
        state = example.agent.asked(str(folder / f"out/data/{question.domain.table}.db"), question.text)
        for _ in range(SAMPLES):
            is_right = rng.random() < RIGHT
            wrong = example.careless(question) if rng.random() < 0.5 else example.slip(question, rng)
            said = example.dialogue(
                example.agent.WRITE, example.agent.written(state), question.query if is_right else wrong
            )
            lines.append({**said, "score": float(is_right)})
    example.write_lines(folder / "runs.jsonl", lines)


def experiment(text: str) -> str:
    """Return the example's experiment with the two learners in the place of its last algorithm."""
    start = text.index("[[algorithm]]           # then find out")
    return text[:start] + LEARNERS + text[text.index("[schedule]") :]


async def goals(store: Path) -> dict[int, float]:
    """Return the mean of the goal by the step after which it was validated; a rollout without one counts as 0."""
    database = SQLiteStore(f"sqlite:///{store}")
    found: defaultdict[int, list[float]] = defaultdict(list)
    try:
        for rollout in await database.rollouts(RolloutQuery(mode="val", limit=100_000)):
            spans = await database.spans(rollout.rollout_id)
            values = [span.reward.dimensions.get("goal") for span in spans if span.reward]
            found[rollout.metadata["step"]].append((values[-1] if values else 0.0) or 0.0)
    finally:
        await database.close()
    return {step: sum(values) / len(values) for step, values in sorted(found.items())}


def main() -> None:
    """Record, import, export, train, and print the held-out reward."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "sql"
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("out", "tests", "__pycache__"))

        def call(*words: str) -> None:
            subprocess.run([sys.executable, *words], cwd=folder, check=True)

        call("make_data.py", "--seed", str(seed))
        call(str(EXAMPLE.parent / "make_model.py"), "--seed", str(seed))
        record(folder, seed=seed)
        store = ("--store", "sqlite:///imported.db")
        call("-m", "agl", "data", "import", "runs.jsonl", "--reward", "score", *store)
        call("-m", "agl", "data", "export", "--min-reward", "1", "--output", "out/good.jsonl", *store)
        call("-m", "agl", "data", "export", "--format", "dpo", "--output", "out/pairs.jsonl", *store)
        text = (folder / "experiment.toml").read_text(encoding="utf-8")
        (folder / "imported.toml").write_text(experiment(text), encoding="utf-8")
        call("-m", "agl", "run", "imported.toml", "--set", f"experiment.seed={seed}")
        measured = asyncio.run(goals(folder / "out/runs.db"))
    print(f"goal on the held-out questions, seed {seed}:")
    for step, name in STAGES.items():
        print(f"  {name:>10}  {measured[step]:.2f}")
    print(f"  gained {measured[15] - measured[5]:+.2f}; the bar is +0.15")


if __name__ == "__main__":
    main()
