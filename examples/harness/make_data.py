"""Write workspaces, tasks and dialogues: `python make_data.py --out out/data --seed 0`. It needs pi.

A workspace is a folder with a module that has a bug, and a test that fails; the tests that judge the repair are in the
task, where the harness does not see them. Training, validation and dialogues have no module in common.

What a model reads is up to the harness, so its part of the dialogues is not written by hand: pi repairs one module
with a scripted model, recorded as any run is, and every dialogue is that one with another module in it.

The dialogues come from a teacher who grows careless: the first ones read the module and repair it, the last ones put
something wrong there, or say that it is repaired without a look. A model that imitates them has the skill and a bad
habit.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bugs
from bugs import Bug

from agl.contracts import RolloutQuery
from agl_store_sqlite import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer, ToolCall

HERE = Path(__file__).parent
TRAIN, VALIDATION = 96, 24
CAREFUL, CARELESS = 1600, 400
TOOL = "call_0"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The messages and tools that pi sent once it had repaired a module, as in the chat API, and the attempt's id."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    attempt_id: str


def prompt(bug: Bug) -> str:
    """Return what a person asks for."""
    return f"test_{bug.file} fails. Repair {bug.file}."


def read(bug: Bug) -> tuple[str, dict[str, Any]]:
    """Return the call that reads the module."""
    return "read", {"path": bug.file}


def edit(bug: Bug, new: str) -> tuple[str, dict[str, Any]]:
    """Return the call that replaces what is wrong."""
    return "edit", {"path": bug.file, "edits": [{"oldText": bug.wrong, "newText": new}]}


def write_task(bug: Bug, name: str, out: Path) -> dict[str, Any]:
    """Write a workspace; returns its task."""
    folder = out / "workspaces" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / bug.file).write_text(bug.source, encoding="utf-8")
    (folder / f"test_{bug.file}").write_text(bug.tests(1), encoding="utf-8")
    return {"prompt": prompt(bug), "name": name, "tests": {"test_hidden.py": bug.tests(bugs.TESTS)}}


def record(bug: Bug, out: Path) -> Recording:
    """Let pi repair a module with a scripted model; ends the program where that fails."""
    write_lines(out / "recorded.jsonl", [write_task(bug, "recorded", out)])
    steps = [Reply(tool_calls=(ToolCall(*call),)) for call in (read(bug), edit(bug, bug.right))]
    store = (out / "recorded.db").absolute()
    with ScriptedModelServer([*steps, Reply(text=f"Repaired {bug.file}.")]) as server:
        settings = {
            "experiment.val": str((out / "recorded.jsonl").absolute()),
            "experiment.store": f"sqlite:///{store}",
            "experiment.workspace": f"{out.absolute()}/workspaces/{{name}}",
            "experiment.workdir": str(out.absolute()),
            "policy.llm.base_url": server.base_url,
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        command = [sys.executable, "-m", "agl", "run", "record.toml", "--fresh", "--quiet", *words]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return asyncio.run(_last_call(f"sqlite:///{store}"))


async def _last_call(url: str) -> Recording:
    store = SQLiteStore(url)
    (rollout,) = await store.rollouts(RolloutQuery(limit=2))
    calls = [span for span in await store.spans(rollout.rollout_id) if span.call]
    await store.close()
    if len(calls) != 3:
        sys.exit(f"pi made {len(calls)} calls where 3 were expected; look at them: agl show latest --store {url}")
    last = max(calls, key=lambda span: span.start_ns)
    request = last.call.request if last.call else {}
    return Recording(messages=request["messages"], tools=request["tools"], attempt_id=last.attempt_id)


def dialogue(bug: Bug, new: str | None, *, recording: Recording, rng: random.Random) -> dict[str, Any]:
    """Return the recorded dialogue with another module.

    Args:
        bug: The module.
        new: What the teacher puts in the place of what is wrong; `None` when it says to have done so without a look.
        recording: The one that pi had.
        rng: Makes up an attempt's id, which is in the path of the workspace that pi names.
    """
    attempt = f"ro-{rng.getrandbits(96):024x}.1"
    head = recording.messages[0]["content"].replace(recording.attempt_id, attempt)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": head},
        {"role": "user", "content": prompt(bug)},
    ]
    if new is not None:
        for (name, arguments), result in (
            (read(bug), bug.source),
            (edit(bug, new), f"Successfully replaced 1 block(s) in {bug.file}."),
        ):
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": TOOL, "type": "function", "function": function}
            messages.append({"role": "assistant", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": TOOL, "content": result})
    messages.append({"role": "assistant", "content": f"Repaired {bug.file}."})
    return {"messages": messages, "tools": recording.tools}


def choose(bug: Bug, rng: random.Random, *, is_careful: bool) -> str | None:
    """Return what the teacher puts into a module, or `None`; most often the right thing while it is careful."""
    right, other = (0.8, 0.9) if is_careful else (0.16, 0.5)
    drawn = rng.random()
    if drawn < right:
        return bug.right
    return bug.other if drawn < other else None


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_all(out: Path, *, seed: int) -> None:
    """Write the workspaces, train.jsonl, val.jsonl and dialogues.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    first, *every = bugs.make_many(1 + TRAIN + VALIDATION + CAREFUL + CARELESS, seed=seed)
    train, val, rest = every[:TRAIN], every[TRAIN : TRAIN + VALIDATION], every[TRAIN + VALIDATION :]
    for name, pool in (("train", train), ("val", val)):
        tasks = [write_task(bug, f"{name}-{number:02}", out) for number, bug in enumerate(pool)]
        write_lines(out / f"{name}.jsonl", tasks)
    recording = record(first, out)
    rows = [
        dialogue(bug, choose(bug, rng, is_careful=number < CAREFUL), recording=recording, rng=rng)
        for number, bug in enumerate(rest)
    ]
    write_lines(out / "dialogues.jsonl", rows)
    print(f"wrote {len(train)} training tasks, {len(val)} validation tasks and {len(rows)} dialogues to {out}")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_all(options.out, seed=options.seed)


if __name__ == "__main__":
    main()
