"""Write the store, the tasks and the dialogues of the example: `python make_data.py --out out/data --seed 0`.

The store is an SQLite database of numbered parts.
Training, validation and dialogue parts are three disjoint sets.

What the models read is up to CrewAI: its prompts, its tools for delegation, its order. So the crew itself is run twice,
against a server that answers as a teacher would; its own requests, with other parts in them, are the dialogues. The
teacher's clerk is diligent. The teacher's lead grows careless: the first dialogues show how to delegate, the last
ones mostly give up. A model that imitates them has the skill and a bad habit, and reinforcement learning has
something to find out.
"""

import argparse
import json
import os
import random
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agl import PluginManager
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, ToolCall

TRAIN, VALIDATION = 1000, 96
DILIGENT, CARELESS = 1600, 320
CARE = 0.25
"""The probability that the careless lead still delegates."""

SAMPLE, SAMPLE_COUNT = "90218", "77345"
"""A part and a count that occur nowhere else in a request; real ones have four and three digits."""


def numbers(length: int) -> list[str]:
    """Return all numbers of that length whose digits differ; a model this small mixes up repeated ones."""
    return [n for n in map(str, range(10 ** (length - 1), 10**length)) if len(set(n)) == length]


def question(part: str) -> str:
    """Return what a customer asks."""
    return f"How many of part {part} are in stock?"


def stock_up(path: Path, counts: dict[str, str]) -> None:
    """Make the store anew, with so many of each part."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("CREATE TABLE parts (part TEXT PRIMARY KEY, count INTEGER NOT NULL)")
        store.executemany("INSERT INTO parts VALUES (?, ?)", counts.items())


def diligent(request: ModelRequest) -> Reply:
    """The lead delegates, the clerk looks; then both say what they were told."""
    tools = [tool["function"]["name"] for tool in request.body["tools"]]
    if request.body["messages"][-1]["role"] == "tool":
        return Reply(text=f"There are {SAMPLE_COUNT}.")
    if "stock" in tools:
        return Reply(tool_calls=(ToolCall("stock", {"part": SAMPLE}),))
    wish = {"task": f"Count part {SAMPLE}.", "context": "A customer asks.", "coworker": "clerk"}
    return Reply(tool_calls=(ToolCall("delegate_work_to_coworker", wish),))


def careless(request: ModelRequest) -> Reply:
    """Give up."""
    return Reply(text="I am not sure.")


def worker_env() -> dict[str, str]:
    """Return what the tracer sets in the processes that run a crew, so that CrewAI sends no telemetry."""
    manager = PluginManager.from_environment()
    return dict(manager.build(manager.tracer("crewai")).worker_env())


def record(teacher: Callable[[ModelRequest], Reply]) -> dict[str, str]:
    """Run the crew on the sample; returns each agent's whole conversation as JSON, by its role."""
    with ScriptedModelServer(respond=teacher) as server, tempfile.TemporaryDirectory() as folder:
        os.environ |= worker_env()
        os.environ |= {"OPENAI_BASE_URL": server.base_url, "STOCK_DB": f"{folder}/stock.db"}
        stock_up(Path(folder) / "stock.db", {SAMPLE: SAMPLE_COUNT})
        import agent

        agent.model.cache_clear()
        agent.solve({"question": question(SAMPLE)})
        conversations: dict[str, str] = {}
        for call in server.calls:  # an agent's last request holds its earlier ones
            answer = json.loads(call.sent)["choices"][0]["message"]
            messages = [*call.json["messages"], {"role": "assistant", "content": answer["content"]}]
            role = "lead" if messages[0]["content"].startswith("You are lead.") else "clerk"
            conversations[role] = json.dumps({"messages": messages, "tools": call.json["tools"]})
    return conversations


def dialogues(counts: dict[str, str], *, seed: int) -> list[str]:
    """Return the teacher's dialogues as JSON: one of the lead and one of the clerk for each part."""
    rng = random.Random(seed)
    good, bad = record(diligent), record(careless)
    lines: list[str] = []
    for index, (part, count) in enumerate(counts.items()):
        is_diligent = rng.random() < (0.8 if index < DILIGENT else CARE)
        for text in (good["clerk"], (good if is_diligent else bad)["lead"]):
            lines.append(text.replace(SAMPLE, part).replace(SAMPLE_COUNT, count))
    return lines


def write_lines(path: Path, lines: list[str]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Write stock.db, train.jsonl, val.jsonl and dialogues.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    amounts = numbers(3)
    parts = rng.sample(numbers(4), TRAIN + VALIDATION + DILIGENT + CARELESS)
    counts = {part: rng.choice(amounts) for part in parts}
    tasks = [json.dumps({"question": question(part), "answer": count}) for part, count in counts.items()]
    stock_up(options.out / "stock.db", counts)
    write_lines(options.out / "train.jsonl", tasks[:TRAIN])
    write_lines(options.out / "val.jsonl", tasks[TRAIN : TRAIN + VALIDATION])
    rest = dict(list(counts.items())[TRAIN + VALIDATION :])
    write_lines(options.out / "dialogues.jsonl", dialogues(rest, seed=options.seed))
    print(f"wrote {TRAIN} training tasks, {VALIDATION} validation tasks and {2 * len(rest)} dialogues to {options.out}")


if __name__ == "__main__":
    main()
