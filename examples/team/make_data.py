"""Write the orders and the dialogues of the example: `python make_data.py --out out/data --seed 0`.

Each fruit has its box, which the guide learns by heart; how many lie in it is different in every order, and only who
opens the box can know. The dialogues come from two teachers who grow careless: at first most are right, at the end the
guide often names the box by the door, and the picker often reports without looking. A model that imitates them has both
skills and both bad habits.
"""

import argparse
import json
import random
from itertools import permutations
from pathlib import Path

from agent import GUIDE, PICKER

FRUITS = ("apple", "coconut", "date", "fig", "grape", "kiwi", "lemon", "lime", "melon", "papaya", "pear", "plum")
BOXES = dict(zip(FRUITS, "HCLAKFDJBGEI", strict=True))
DOOR = "A"
WISHES = ("How many {}s?", "Are there {}s?", "I need {}s.", "Count the {}s.")
COUNTS = ["".join(digits) for digits in permutations("123456789", 2)]
"""Numbers whose digits differ; a model this small mixes up repeated ones."""
TRAIN, VALIDATION, DILIGENT, CARELESS = 1000, 64, 1500, 320

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Open a box and count what lies in it.",
        "parameters": {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]},
    },
}


def make_order(rng: random.Random) -> dict[str, object]:
    """Return a task; `box`, the right one, is hidden from the team and known to the reward."""
    fruit = rng.choice([fruit for fruit, box in BOXES.items() if box != DOOR])
    counts = dict(zip(BOXES.values(), rng.sample(COUNTS, len(BOXES)), strict=True))
    return {"order": rng.choice(WISHES).format(fruit), "boxes": counts, "box": BOXES[fruit]}


def guided(task: dict[str, object], *, is_careful: bool) -> dict[str, object]:
    """Return the guide's dialogue about an order."""
    answer = {"role": "assistant", "content": task["box"] if is_careful else DOOR}
    return {"messages": [*said(GUIDE, str(task["order"])), answer]}


def picked(task: dict[str, object], *, is_careful: bool) -> dict[str, object]:
    """Return the picker's dialogue after a guide named the right box."""
    box = str(task["box"])
    messages = said(PICKER, box)
    if is_careful:
        call = {"name": "look", "arguments": json.dumps({"box": box})}
        messages += [
            {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "call_1", "content": task["boxes"][box]},
        ]
    messages.append({"role": "assistant", "content": task["boxes"][box] if is_careful else "many"})
    return {"messages": messages, "tools": [LOOK]}


def said(system: str, user: str) -> list[dict[str, object]]:
    """Return the beginning of a conversation."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def dialogues(rng: random.Random) -> list[dict[str, object]]:
    """Return the teachers' dialogues, most of the careful ones first."""
    found: list[dict[str, object]] = []
    for care in [0.8] * DILIGENT + [0.55] * CARELESS:
        task = make_order(rng)
        found += [write(task, is_careful=rng.random() < care) for write in (guided, picked)]
    return found


def main() -> None:
    """Write train.jsonl, val.jsonl and dialogues.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    files = {
        "train": [make_order(rng) for _ in range(TRAIN)],
        "val": [make_order(rng) for _ in range(VALIDATION)],
        "dialogues": dialogues(rng),
    }
    for name, rows in files.items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {', '.join(f'{len(rows)} lines of {name}' for name, rows in files.items())} to {options.out}")


if __name__ == "__main__":
    main()
