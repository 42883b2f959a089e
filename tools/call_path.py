"""Measures the way of a model call from the agent's client to the gradient: files and types that hold its data.

    python -m tools.call_path

One step of GRPO runs on a tiny model with a gateway, on an agent that writes a mark into its prompt. From the first
call's departure to the optimiser's update, every call of a function and every return in the project's sources is
watched: a file holds the call when an argument or a result there holds the mark, as text, bytes or token ids. It is on
the way when the mark passes from it, by calls and returns, to a file where a stage ends: the client's departure, the
gateway's sender and recorder, the store's tables, the training loop. Files that only look at what they get and note
findings (watchers, tallies, checks, links between calls) lie beside the way and are counted apart, and so are the files
of the policy server, which stands for any model.
``docs/explanation/data-flow.md`` leads through those to open first.

It needs the environment of the session ``example(calc)``.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from agl_run import Trainer, load_config

ROOT = Path(__file__).parents[1]
CALC = ROOT / "examples" / "calc"
MARK = "zq7zq"
TASK = '{"question": "What is 7*5-4?"}\n'
AGENT = f"""
import random

from openai import AsyncOpenAI

async def solve(task):
    async with AsyncOpenAI() as client:
        messages = [{{"role": "user", "content": "{MARK} " + task["question"]}}]
        await client.chat.completions.create(model="calc-lm", messages=messages, max_tokens=8)
    return random.random()  # rewards that differ, so that there is a gradient
"""
EXPERIMENT = """
[experiment]
agent = "marked_agent:solve"
store = "sqlite:///runs.db"
train = "task.jsonl"

[policy.calc-lm]
use = "torch"
model = "model"

[[algorithm]]
use = "grpo"
tunes = "calc-lm"
params = { steps = 1, tasks_per_step = 1, group_size = 4 }
"""
SERVER = frozenset(
    f"agl_algo_torch/serving/{name}.py"
    for name in ("codec", "engine", "exchange", "sequence", "server", "templates", "wire", "writers")
)
ENDS = frozenset(
    (
        *("agl/tracing/_wire/hook.py", "agl_gateway/record/recorder.py", "agl_store_sqlite/_tables.py"),
        *("agl_gateway/relay/sender.py", "agl_algo_torch/grpo.py"),
    )
)
MAX_DEPTH = 6
MAX_ITEMS = 64


class MarkFinder:
    """Finds the mark in values, within records and containers."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._bytes = [MARK.encode(), *(array(code, ids).tobytes() for code in "HIQ")]

    def is_in(self, value: Any, depth: int = MAX_DEPTH) -> bool:
        """True if the mark is in the value, at most ``depth`` containers deep."""
        if isinstance(value, str):
            return MARK in value
        if isinstance(value, bytes | bytearray | memoryview):
            return any(part in bytes(value) for part in self._bytes)
        if depth == 0 or value is None or isinstance(value, int | float):
            return False
        if type(value).__name__ == "Tensor":
            return not value.is_floating_point() and self._has_ids(value.flatten().tolist())
        if isinstance(value, list | tuple) and value and type(value[0]) is int:
            return self._has_ids(list(value))
        return any(self.is_in(part, depth - 1) for part in parts_of(value))

    def _has_ids(self, numbers: list[int]) -> bool:
        width = len(self._ids)
        starts = (i for i, number in enumerate(numbers) if number == self._ids[0])
        return any(numbers[start : start + width] == self._ids for start in starts)


def parts_of(value: Any) -> Iterable[Any]:
    """The items of a container, or the fields of a record; nothing of other objects, which are no data."""
    kind = type(value)
    if isinstance(value, type):
        return []
    if isinstance(value, dict):
        return list(value.values())[:MAX_ITEMS]
    if isinstance(value, list | tuple):
        return value[:MAX_ITEMS]
    if hasattr(kind, "__struct_fields__"):
        return [getattr(value, name) for name in kind.__struct_fields__]
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if kind.__module__.startswith("agl.dialects") and kind.__name__ == "Request":
        return [getattr(value, "body", None)]  # not there yet while it is made
    if kind.__module__.startswith("httpx") and kind.__name__ == "Request":
        return [getattr(value, "_content", None)]
    return []


class Watch:
    """A profile function that notes where the mark passes, between the first departure and the update.

    Attributes:
        functions: Functions that held the mark, by file.
        receivers: Files to which a file passed the mark, by a call or as a result.
        types: Types of the values that held it, each with its files.
    """

    def __init__(self, finder: MarkFinder) -> None:
        self.functions: defaultdict[str, set[str]] = defaultdict(set)
        self.receivers: defaultdict[str, set[str]] = defaultdict(set)
        self.types: defaultdict[str, set[str]] = defaultdict(set)
        self._finder = finder
        self._state = "before"
        self._busy = threading.local()

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Look at one call or return; see :func:`sys.setprofile`."""
        code = frame.f_code
        if event not in ("call", "return") or "/packages/" not in code.co_filename or self._state == "after":
            return
        file = code.co_filename.rpartition("/src/")[2]
        if self._state == "before" and file == "agl/tracing/_wire/hook.py" and code.co_name == "send":
            self._state = "on the way"
        if self._state == "before" or getattr(self._busy, "is_on", False):
            return
        self._busy.is_on = True
        try:
            self._look(file, frame, event, result)
        finally:
            self._busy.is_on = False
        if (file, code.co_name, event) == ("agl_algo_torch/grpo.py", "_update", "return"):
            self._state = "after"

    def _look(self, file: str, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names] if event == "call" else [result]
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        other = caller.rpartition("/src/")[2] if "/packages/" in caller else file
        giver, receiver = (other, file) if event == "call" else (file, other)
        for value in values:
            if self._finder.is_in(value):
                self.functions[file].add(code.co_name)
                self.receivers[giver].add(receiver)
                self.types[type(value).__name__].add(file)

    def way(self) -> set[str]:
        """Return the files from which the mark passes to the end of a stage."""
        way = set(ENDS)
        while more := {file for file, receivers in self.receivers.items() if receivers & way} - way:
            way |= more
        return way & set(self.functions)


def main() -> None:
    """Run the step and print what was found."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        watch = Watch(MarkFinder(prepare(Path(folder))))
        trainer = Trainer.from_config(load_config(Path("experiment.toml")))
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            trainer.fit()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    server = sorted(set(watch.functions) & SERVER)
    way = sorted(watch.way() - SERVER)
    beside = sorted(set(watch.functions) - SERVER - set(way))
    for title, files in (("On the way", way), ("Beside it", beside)):
        print(f"{title}:", *(f"  {file}: {', '.join(sorted(watch.functions[file]))}" for file in files), sep="\n")
    print(f"\n{len(way)} files on the way, {len(beside)} beside it, and {len(server)} of the policy server")
    print(f"types: {', '.join(sorted(watch.types))}")


def prepare(folder: Path) -> list[int]:
    """Write the experiment and make its model; returns the mark's token ids."""
    makers = (
        [CALC / "make_data.py", "--out", "data"],
        [CALC.parent / "make_model.py", CALC / "model.toml", "--out", "."],
    )
    for words in makers:
        subprocess.run([sys.executable, *map(str, words)], cwd=folder, check=True)
    texts = {"task.jsonl": TASK, "marked_agent.py": AGENT, "experiment.toml": EXPERIMENT}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder / "model"))
    return list(tokenizer(MARK, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    main()
