"""Write the tasks and the dialogues of the example: `python make_data.py --out out/data --seed 0`.

A task has six pictures of 8 x 8 pixels, each of one of six colours and each a little different. The dialogues come from
a teacher who often names the wrong letter. A model that imitates it knows the colours and answers as carelessly, so
reinforcement learning has something to find out.
"""

import argparse
import base64
import json
import random
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
SPREAD, SIDE, PICTURES = 20, 8, 6
TRAIN, VALIDATION, DIALOGUES = 600, 96, 3200
CARE = 0.55
"""How often the teacher looks; otherwise it guesses."""


def picture(letter: str, chance: random.Random) -> str:
    """Return a picture of a letter's colour as a data URL."""
    colour = tuple(part + chance.randint(-SPREAD, SPREAD) for part in COLOURS[letter])
    file = BytesIO()
    Image.new("RGB", (SIDE, SIDE), colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def task(chance: random.Random) -> dict[str, object]:
    """Return a task; `letters` is hidden from the agent and known to the reward."""
    letters = "".join(chance.choices(list(COLOURS), k=PICTURES))
    return {"pictures": [picture(letter, chance) for letter in letters], "letters": letters}


def dialogue(chance: random.Random) -> dict[str, object]:
    """Return one conversation of the teacher as the OpenAI chat API has it."""
    found = task(chance)
    letters, pictures = str(found["letters"]), list(found["pictures"])  # type: ignore[call-overload]
    said = [letter if chance.random() < CARE else chance.choice(list(COLOURS)) for letter in letters]
    messages: list[object] = []
    for start in range(0, PICTURES, AT_ONCE):
        messages.append(question(pictures[start : start + AT_ONCE]))
        messages.append({"role": "assistant", "content": "".join(said[start : start + AT_ONCE])})
    return {"messages": messages}


def main() -> None:
    """Write train.jsonl, val.jsonl and dialogues.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(options.seed)
    files = {"train": (TRAIN, task), "val": (VALIDATION, task), "dialogues": (DIALOGUES, dialogue)}
    for name, (count, make) in files.items():
        lines = [json.dumps(make(chance)) + "\n" for _ in range(count)]
        (options.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"wrote {TRAIN} training tasks, {VALIDATION} validation tasks and {DIALOGUES} dialogues to {options.out}")


if __name__ == "__main__":
    main()
