"""Agents that behave or misbehave as their task says, for the tests of runners.

``task["do"]`` names one of the :data:`BEHAVIOURS`. As a program (``python -m agl_testing.agents``) the
agent reads its task as JSON from standard input and prints the reward, as the runner ``command`` expects. The module
imports no test framework, so child processes start fast.
"""

import asyncio
import gc
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from io import FileIO
from typing import Any

import agl

HANG_S = 120.0
BEAT_S = 0.02
MAX_TEXT = 10_000


def behave(task: dict[str, Any]) -> Any:
    """Carry out the task's behaviour, as a plain function."""
    return BEHAVIOURS[task["do"]](task)


async def behave_async(task: dict[str, Any]) -> Any:
    """Carry out the task's behaviour, as a coroutine function; only ``hang`` yields to the event loop throughout."""
    await asyncio.sleep(0)
    if task["do"] == "hang":
        deadline = time.monotonic() + HANG_S
        with _beats(task) as file:
            while time.monotonic() < deadline:
                file.write(b".")
                await asyncio.sleep(BEAT_S)
    return BEHAVIOURS[task["do"]](task)


def _return(task: dict[str, Any]) -> Any:
    time.sleep(task.get("seconds", 0.0))
    return task["value"]


def _emit(task: dict[str, Any]) -> None:
    with agl.operation("outer"):
        agl.emit_message(task["text"])
    agl.emit_reward(task["value"], name="emitted")


def _raise(task: dict[str, Any]) -> None:
    raise ValueError(task["text"])


def _exit(_: dict[str, Any]) -> None:
    sys.exit(3)


def _hard_exit(_: dict[str, Any]) -> None:
    os._exit(7)


def _cancelled(_: dict[str, Any]) -> None:
    raise asyncio.CancelledError


def _object(_: dict[str, Any]) -> object:
    return object()


def _keys(task: dict[str, Any]) -> list[str]:
    return sorted(task)


def _search(task: dict[str, Any]) -> list[str]:
    """Return the local variables, as text, that mention the task, in all running functions and suspended coroutines."""
    tops = sys._current_frames().values()  # pyright: ignore[reportPrivateUsage]  # documented
    frames = [frame for top in tops for frame, _ in traceback.walk_stack(top)]
    frames += [found.cr_frame for found in gc.get_objects() if inspect.iscoroutine(found) and found.cr_frame]
    texts = {repr(value) for frame in frames for value in frame.f_locals.values()}
    return sorted(text for text in texts if repr(task["do"]) in text and len(text) < MAX_TEXT)


def _hang(task: dict[str, Any]) -> None:
    deadline = time.monotonic() + HANG_S
    with _beats(task) as file:
        while time.monotonic() < deadline:
            file.write(b".")
            time.sleep(BEAT_S)


def _beats(task: dict[str, Any]) -> FileIO:
    """Open the file of beats, once for all: a runner that stops a thread may interrupt it while it opens one."""
    return FileIO(task["beats"], "ab")


BEHAVIOURS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "return": _return,
    "emit": _emit,
    "raise": _raise,
    "exit": _exit,
    "hard_exit": _hard_exit,
    "cancelled": _cancelled,
    "object": _object,
    "keys": _keys,
    "search": _search,
    "hang": _hang,
}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    result = behave(given)
    print(json.dumps({"reward": result} if isinstance(result, int | float) else result))
