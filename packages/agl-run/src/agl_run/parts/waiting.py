"""Shows long waits of an experiment, and estimates the remaining time of its algorithms from their parameters."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

FIRST_S = 1.0
"""Seconds after which a wait is first shown."""

AGAIN_S = 30.0
"""Seconds between two reminders of the same wait."""

_KEPT = 5
"""The number of recent steps from which the mean duration of a step is computed."""


@contextmanager
def waiting_for(what: str, *, say: Callable[[str], None] | None) -> Generator[None]:
    """Show a line once the block takes longer than :data:`FIRST_S`, then reminders, and a line at the block's end.

    The lines come from a thread, because loading a model may keep the event loop busy.

    Args:
        what: The work in the block, such as ``loading 'some-model'``.
        say: Called with each line; with ``None`` nothing is shown.
    """
    if say is None:
        yield
        return
    # A thread and not a task: loading a model may block the event loop for minutes.
    is_over = threading.Event()
    started = time.monotonic()
    teller = threading.Thread(target=_tell, args=(what, say, is_over, started), daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        # Joined, so that no reminder follows the line that reports the end of the wait.
        teller.join()
    if time.monotonic() - started >= FIRST_S:
        say(f"{what}: done after {time.monotonic() - started:.0f} s")


def _tell(what: str, say: Callable[[str], None], is_over: threading.Event, started: float) -> None:
    if is_over.wait(FIRST_S):
        return
    say(f"{what} ...")
    while not is_over.wait(AGAIN_S):
        say(f"{what}: still waiting after {time.monotonic() - started:.0f} s")


def loading(name: str, use: str, params: Mapping[str, Any], *, folder: Path) -> str:
    """Describe the start of a policy: its model, the folder or address of the model, and the server."""
    model, url = params.get("model"), params.get("base_url")
    shown = f"loading {model!r}" if model else "starting"
    if isinstance(model, str) and (folder / model).is_dir():
        shown = f"loading {Path(model).name!r} from the folder {folder / model}"
    return f"policy {name!r}: {shown}{f' at {url}' if isinstance(url, str) and url else ''} with {use}"


def parameter(factory: Any, params: Mapping[str, Any], name: str) -> Any:
    """Return the value of an algorithm's parameter, or its default; ``None`` if the algorithm has no such parameter.

    A dotted name such as ``lora.rank`` is a key of a table.
    """
    name, _, key = name.partition(".")
    try:
        default = signature(factory).parameters[name].default
    except (KeyError, TypeError, ValueError):
        return None
    if key:
        return params.get(name, {}).get(key, getattr(default, key, None))
    return params.get(name, None if default is Parameter.empty else default)


def steps_in_all(factory: Any, params: Mapping[str, Any]) -> int:
    """Return the number of steps that an algorithm takes (its parameter ``steps``); 0 if it sets no limit."""
    found = parameter(factory, params, "steps")
    return found if isinstance(found, int) else 0


class StepTimes:
    """Measures an algorithm's steps in this process, and estimates the remaining time from the recent ones.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Recent steps only: the first ones load caches, and answers get longer while a model
        # learns.
        self._ends: deque[float] = deque([clock()], maxlen=_KEPT + 1)

    def ended(self, *, left: int) -> str:
        """Record the end of a step; return the estimated time of ``left`` further steps as text, ``""`` below 1 s."""
        self._ends.append(self._clock())
        mean = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"about {_duration(mean * left)} left" if mean * left >= 1 else ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
