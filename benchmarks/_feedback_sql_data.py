"""Writes the databases, tasks and dialogues of the SQL example for the feedback benchmark; a program of its own.

The example's `make_data` imports its agent. Here the agent is the one in `--place`, which needs no framework.
"""

import argparse
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any


def told(folder: Path, question: Any, *, data: Any, rng: random.Random) -> dict[str, Any]:
    """A dialogue in which a user says what was wrong with an earlier query, or which one was right."""
    asked = data.writing(folder, question, is_right=True, rng=rng)
    _, result = data.failure(str(folder / f"{question.domain.table}.db"), question, rng)
    wrong, right = f"Wrong: {result.removeprefix('error: ')}", f"Right: {question.query}"
    lesson = {"role": "user", "content": rng.choice([wrong, wrong, right, f"{right}\n\n{wrong}"])}
    *before, answer = asked["messages"]
    return {"messages": [*before, lesson, answer]}


def dialogues(folder: Path, *, data: Any, what: str, count: int) -> list[dict[str, Any]]:
    """Return plain dialogues and as many with a lesson; the plain ones are diligent, or careless for `low`."""
    rng = random.Random(what)
    rate = data.LIKELY_RIGHT if what == "skilled" else data.RARELY_RIGHT
    rest = data.pool(folder, seed=0)[data.TRAIN + data.VALIDATION :]
    found: list[dict[str, Any]] = []
    for _ in range(count // 2):
        question = rng.choice(rest)
        found.append(data.writing(folder, question, is_right=rng.random() < rate, rng=rng))
        found.append(told(folder, question, data=data, rng=rng))
    return found


def main() -> None:
    """Write what is asked for below `--place`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--example", type=Path, required=True)
    parser.add_argument("--what", choices=("databases", "skilled", "low"), required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    sys.path[:0] = [str(options.place), str(options.example)]
    data = importlib.import_module("make_data")
    folder: Path = options.place / "out" / "data"
    if options.what == "databases":
        sys.argv[1:] = ["--out", str(folder), "--seed", "0"]
        data.main()
        return
    found = dialogues(folder, data=data, what=options.what, count=options.count)
    text = "".join(f"{json.dumps(line)}\n" for line in found)
    (folder / f"{options.what}.jsonl").write_text(text, encoding="utf-8")
    if options.what == "skilled":  # the tokenizer learns from these, too
        (folder / "write.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
