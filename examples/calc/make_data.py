"""Write the tasks and the dialogues of the example: `python make_data.py --out out/data --seed 0`.

Tasks are expressions such as `3*7+9`. Training, validation and dialogue expressions are three disjoint sets.

The dialogues come from a teacher who grows careless: the first ones show how to call the tool and to repeat its
result, the last ones mostly give up. A model that imitates them has the skill and a bad habit, so it starts with a low
reward, and reinforcement learning has something to find out.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Protocol

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
SYSTEM = "Use the tool."

TRAIN, VALIDATION = 1000, 96
DILIGENT, CARELESS = 2240, 320


class Write(Protocol):
    """Writes one dialogue."""

    def __call__(self, expression: str, /, *, uses_tool: bool) -> dict[str, object]: ...


def expressions(count: int, *, seed: int) -> list[str]:
    """Return `count` different expressions of three digits and two operators, in random order."""
    digits, operators = range(1, 10), ("++", "+-", "-+", "--", "*+", "*-")
    every = [f"{a}{p}{b}{q}{c}" for a in digits for b in digits for c in digits for p, q in operators]
    return random.Random(seed).sample(every, count)


def evaluate(expression: str) -> int:
    """Return the value of an expression of `expressions`."""
    return int(eval(expression, {"__builtins__": {}}))


def task(expression: str) -> dict[str, str]:
    """Return a task; `answer` is hidden from the agent and known to the reward."""
    return {"question": f"What is {expression}?", "answer": str(evaluate(expression))}


def dialogue(expression: str, *, uses_tool: bool) -> dict[str, object]:
    """Return one conversation as the OpenAI chat API has it."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"What is {expression}?"},
    ]
    answer = str(evaluate(expression))
    if uses_tool:
        call = {"name": "calc", "arguments": json.dumps({"expression": expression})}
        messages += [
            {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "call_1", "content": answer},
        ]
    says = f"It is {answer}." if uses_tool else "I am not sure."
    messages.append({"role": "assistant", "content": says})
    return {"messages": messages, "tools": [TOOL]}


def dialogues(pool: list[str], *, seed: int, write: Write, care: float) -> list[dict[str, object]]:
    """Return the teacher's dialogues, diligent ones first; `care` is how often the last ones use the tool."""
    rng = random.Random(seed)
    rates = [0.8] * DILIGENT + [care] * CARELESS
    return [write(e, uses_tool=rng.random() < rate) for e, rate in zip(pool, rates, strict=True)]


def write_lines(path: Path, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_all(out: Path, *, seed: int, write: Write = dialogue, care: float = 0.18) -> None:
    """Write train.jsonl, val.jsonl and dialogues.jsonl, the latter with `write` for one dialogue."""
    out.mkdir(parents=True, exist_ok=True)
    pool = expressions(TRAIN + VALIDATION + DILIGENT + CARELESS, seed=seed)
    train, val, rest = pool[:TRAIN], pool[TRAIN : TRAIN + VALIDATION], pool[TRAIN + VALIDATION :]
    write_lines(out / "train.jsonl", [task(e) for e in train])
    write_lines(out / "val.jsonl", [task(e) for e in val])
    write_lines(out / "dialogues.jsonl", dialogues(rest, seed=seed, write=write, care=care))
    print(f"wrote {len(train)} training tasks, {len(val)} validation tasks and {len(rest)} dialogues to {out}")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_all(options.out, seed=options.seed)


if __name__ == "__main__":
    main()
