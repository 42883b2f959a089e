"""Write the tasks and the dialogues of the example: `python make_data.py --out out/data --seed 0`.

A task has six pictures of 8 x 8 pixels, each in one of 27 shades of one of six colours. The dialogues come from a
teacher who often guesses. A model that imitates it knows the colours and answers as carelessly, so reinforcement
learning has something to find out.
"""

import argparse
import base64
import json
import random
from functools import cache
from io import BytesIO
from pathlib import Path

from agent import AT_ONCE, question
from PIL import Image

COLOURS = {
    "A": (220, 40, 40),
    "B": (40, 200, 60),
    "C": (50, 70, 220),
    "D": (220, 210, 50),
    "E": (200, 60, 210),
    "F": (60, 210, 220),
}
SHADES, SIDE, PICTURES = (-20, 0, 20), 8, 6
TRAIN, VALIDATION, DIALOGUES = 600, 96, 4800
CARE = 0.6
"""Probability that the teacher looks; otherwise it guesses."""


@cache
def picture(*colour: int) -> str:
    """Return a picture of a colour as a data URL."""
    file = BytesIO()
    Image.new("RGB", (SIDE, SIDE), colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def task(chance: random.Random) -> dict[str, str | list[str]]:
    """Return a task; `letters` is hidden from the agent and known to the reward."""
    letters = "".join(chance.choices(list(COLOURS), k=PICTURES))
    shown = [picture(*(part + chance.choice(SHADES) for part in COLOURS[letter])) for letter in letters]
    return {"pictures": shown, "letters": letters}


def dialogue(chance: random.Random) -> dict[str, object]:
    """Return one conversation of the teacher as the OpenAI chat API has it."""
    found = task(chance)
    said = [letter if chance.random() < CARE else chance.choice(list(COLOURS)) for letter in found["letters"]]
    messages: list[object] = []
    for start in range(0, PICTURES, AT_ONCE):
        messages.append(question(list(found["pictures"][start : start + AT_ONCE])))
        messages.append({"role": "assistant", "content": "".join(said[start : start + AT_ONCE])})
    return {"messages": messages}


def exchanged(tasks: list[dict[str, str | list[str]]]) -> list[dict[str, str | list[str]]]:
    """Return tasks with the pictures of their neighbours, so that only a model that cheats is right."""
    return [{**task, "pictures": other["pictures"]} for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True)]


def main() -> None:
    """Write train.jsonl, val.jsonl, exchanged.jsonl and dialogues.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(options.seed)
    train, val = ([task(chance) for _ in range(count)] for count in (TRAIN, VALIDATION))
    dialogues = [dialogue(chance) for _ in range(DIALOGUES)]
    files = {"train": train, "val": val, "exchanged": exchanged(val), "dialogues": dialogues}
    for name, rows in files.items():
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {TRAIN} training tasks, {VALIDATION} validation tasks and {DIALOGUES} dialogues to {options.out}")


if __name__ == "__main__":
    main()
