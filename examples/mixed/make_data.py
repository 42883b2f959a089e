"""Write the letters and the dialogues of the example: `python make_data.py --out out/data --seed 0`.

A task is a customer's letter, and the facts in it as data, which are hidden from the agent. Training, validation and
dialogue letters are three disjoint sets.

The dialogues come from a teacher who reads letters and grows careless: the first drafts are nearly complete, in the
last ones most entries are a question mark. A model that imitates them has the skill and a bad habit, and
reinforcement learning has something to find out. The teacher knows nothing of the styles of the house.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import agent
import house

TRAIN, VALIDATION = 400, 32
DILIGENT, CARELESS = 2400, 320
CARE = 0.5
"""The probability that the careless teacher fills in an entry."""

NAMES, CITIES, ITEMS = (
    words.split()
    for words in (
        "Birch Crane Flint Grove Holt Kane Lark Marsh Moss Pike Quill Reed Stone Teal Thorn Vale Venn Wick Wren Frost",
        "Bergen Porto Leeds Turin Lyon Bremen Ghent Basel Malmo Krakow Split Cork Bilbao Tartu Delft Graz",
        "lamps chairs tables shelves mirrors carpets vases clocks baskets stools desks candles cushions benches",
    )
)
LETTERS = (
    "Please send {quantity} {item} to {name} in {city} by {date}. I will pay {amount}.",
    "This is {name} from {city}. By {date} I need {quantity} {item} for {amount}.",
    "Bring {quantity} {item} to {city} on {date}. For {amount}, yours, {name}",
)


def draw_facts(draw: random.Random) -> dict[str, str]:
    """Return the facts of one letter."""
    return {
        "name": draw.choice(NAMES),
        "city": draw.choice(CITIES),
        "item": draw.choice(ITEMS),
        "quantity": str(draw.randint(2, 12)),
        "amount": str(draw.randint(4, 49) * 10),
        "date": f"{draw.randint(1, 28)} {draw.choice(house.MONTHS)} 2027",
    }


def tasks(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return different tasks."""
    draw = random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        facts = draw_facts(draw)
        found[draw.choice(LETTERS).format(**facts)] = facts
    return [{"letter": letter, "facts": facts} for letter, facts in found.items()]


def dialogue(task: dict[str, Any], *, care: float, draw: random.Random) -> dict[str, Any]:
    """Return the teacher's draft as a conversation; each entry is filled in with probability `care`."""
    entries = {field: fact if draw.random() < care else "?" for field, fact in task["facts"].items()}
    return {
        "messages": [
            {"role": "system", "content": agent.WRITE},
            {"role": "user", "content": task["letter"]},
            {"role": "assistant", "content": house.write_form(entries)},
        ]
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write train.jsonl, val.jsonl and dialogues.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = tasks(TRAIN + VALIDATION + DILIGENT + CARELESS, seed=options.seed)
    train, val, rest = rows[:TRAIN], rows[TRAIN : TRAIN + VALIDATION], rows[TRAIN + VALIDATION :]
    draw = random.Random(f"{options.seed}/teacher")
    cares = [0.9] * DILIGENT + [CARE] * CARELESS
    taught = [dialogue(row, care=care, draw=draw) for row, care in zip(rest, cares, strict=True)]
    for name, part in (("train", train), ("val", val), ("dialogues", taught)):
        write_lines(options.out / f"{name}.jsonl", part)
    print(f"wrote {TRAIN} training tasks, {VALIDATION} validation tasks and {len(taught)} dialogues to {options.out}")


if __name__ == "__main__":
    main()
