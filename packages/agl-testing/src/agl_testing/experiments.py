"""Writes a small experiment (agent, tasks and experiment file) into a folder, for tests that run it as a user would."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from agl.schemas import Json

AGENT = '''"""An agent that asks the model once."""

import openai


async def solve(task, llm):
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        messages = [{"role": "user", "content": task["question"]}]
        answer = await client.chat.completions.create(model=llm.model, messages=messages)
    return 1.0 if answer.choices[0].message.content == task.get("expected") else 0.0
'''

TASKS: Sequence[Json] = tuple({"question": f"what is {n} + {n}?", "expected": str(2 * n)} for n in range(4))


def write_experiment(
    folder: Path,
    *,
    base_url: str = "",
    agent: str = AGENT,
    train: Sequence[Json] = TASKS,
    val: Sequence[Json] = TASKS[:2],
    more: str = "",
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write ``agent.py``, ``train.jsonl``, ``val.jsonl`` and ``experiment.toml``; returns the experiment file.

    Args:
        folder: The folder to write into; created if it does not exist.
        base_url: Base URL of the model API for the policy ``main_llm``; ``""`` for an experiment without a policy.
        agent: Source of the agent's module, which defines ``solve``.
        train: Training tasks.
        val: Validation tasks.
        more: TOML to append to the experiment file, such as an ``[[algorithm]]``.
        files: Texts of further files, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(agent, encoding="utf-8")
    for name, tasks in (("train", train), ("val", val)):
        lines = "".join(json.dumps(task) + "\n" for task in tasks)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    for name, text in (files or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    path = folder / "experiment.toml"
    path.write_text(_toml(base_url) + more, encoding="utf-8")
    return path


def _toml(base_url: str) -> str:
    policy = f'\n[policy.main_llm]\nuse = "openai"\nbase_url = "{base_url}"\nmodel = "scripted"\n' if base_url else ""
    return (
        '[experiment]\nname = "small"\nagent = "agent:solve"\nstore = "sqlite:///runs.db"\n'
        f'train = "train.jsonl"\nval = "val.jsonl"\n{policy}\n'
    )
