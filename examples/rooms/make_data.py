"""Write the tasks of the example: `python make_data.py --out out/data --seed 0`.

A task is a request in words, and what it needs as data, which is hidden from the agent. Each has a room that fits.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import office

TRAIN, VALIDATION = 24, 24
EQUIPMENT = ("screen", "whiteboard", "phone")


def draw_needs(draw: random.Random) -> dict[str, Any]:
    """Return what one meeting needs."""
    return {
        "day": draw.choice(office.DAYS),
        "hour": draw.randint(8, 17),
        "people": draw.randint(2, 14),
        "equipment": sorted(draw.sample(EQUIPMENT, draw.choice((0, 1, 1, 2)))),
        "wheelchair": draw.random() < 0.3,
    }


def request_of(needs: dict[str, Any]) -> str:
    """Return the request in words."""
    text = f"A room for {needs['people']} people on {needs['day']} at {needs['hour']}"
    if needs["equipment"]:
        text += f", with a {' and a '.join(needs['equipment'])}"
    return f"{text}. One of us uses a wheelchair." if needs["wheelchair"] else f"{text}."


def tasks(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return different tasks that have a room which fits."""
    draw = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        needs = draw_needs(draw)
        if office.best_room(needs):
            found.setdefault(request_of(needs), needs)
    return [{"request": request, "needs": needs} for request, needs in found.items()]


def main() -> None:
    """Write train.jsonl and val.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = tasks(TRAIN + VALIDATION, seed=options.seed)
    for name, part in (("train", rows[:TRAIN]), ("val", rows[TRAIN:])):
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    print(f"wrote {TRAIN} training and {VALIDATION} validation tasks to {options.out}")


if __name__ == "__main__":
    main()
