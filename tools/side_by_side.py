"""Runs nox sessions side by side, each in a process of its own, the longest first.

A line is printed for each session when it ends, and its whole output only if it failed. What is not shown stays in
``.nox/logs``. A few sessions that failed are tried once more, alone, so that a machine that was too busy for one of
thousands of tests does not fail them all; the summary names each of them.
"""

import heapq
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".nox" / "logs"
TIMES = Path(__file__).with_name("times.toml")
UNKNOWN_S = 30.0
"""The assumed duration of a session that has no kept time, in seconds."""

GRACE_S = 15.0
"""Seconds that a session has to clean up before it is killed."""

SECOND_TRIES = 2
"""Sessions at most that are tried again; where more fail, it is not chance."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A session that has ended; ``cpu_s`` are the processor's seconds of all its processes.

    ``first_log`` is the output of the try before, where there was one.
    """

    name: str
    log: Path
    status: int
    seconds: float
    cpu_s: float
    first_log: Path | None = None


def read_times() -> dict[str, float]:
    """Seconds that each session takes on two idle cores, roughly."""
    return {name: float(seconds) for name, seconds in tomllib.loads(TIMES.read_text(encoding="utf-8")).items()}


def longest_first(names: Sequence[str], times: Mapping[str, float]) -> list[str]:
    """Put the sessions in the order in which they are to start."""
    return sorted(names, key=lambda name: -times.get(name, UNKNOWN_S))


def time_for(seconds: Sequence[float], *, lanes: int) -> float:
    """Return how long tasks last that start in this order as soon as one of ``lanes`` is free."""
    free_at = [0.0] * lanes
    for each in seconds:
        heapq.heappush(free_at, heapq.heappop(free_at) + each)
    return max(free_at)


def clock(seconds: float) -> str:
    """Minutes and seconds as in ``3:07``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def nox_session(name: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command that runs a session with arguments of its own."""
    return [sys.executable, "-m", "nox", "--no-color", "-s", name, *(["--", *arguments] if arguments else [])]


class SideBySide:
    """Runs sessions, ``lanes`` of them at a time; ``command`` says how one is run, and ``logs`` where outputs go."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        lanes: int,
        command: Callable[[str], Sequence[str]] = nox_session,
        logs: Path = LOGS,
    ) -> None:
        self._times = read_times()
        self._names = longest_first(names, self._times)
        self._lanes = lanes
        self._command = command
        self._logs = logs
        self._changed = threading.Condition()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def run(self, say: Say) -> list[Ended]:
        """Run all of them and return how they ended; stops those that run when it is interrupted."""
        self._logs.mkdir(parents=True, exist_ok=True)
        expected = time_for([self._time(name) for name in self._names], lanes=self._lanes)
        count = f"{len(self._names)} sessions, {self._lanes} at a time"
        say(f"{count}: about {expected / 60:.0f} minutes on two idle cores, longer on a busy machine")
        ended: list[Ended] = []
        # A handler of ours for SIGINT too: a shell ignores it for what it starts in the background, and sessions would
        # inherit that, while a handler becomes the default for them.
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, _interrupt) for number in numbers}
        with ThreadPoolExecutor(self._lanes) as lanes:
            try:
                for future in as_completed([lanes.submit(self._run_one, name) for name in self._names]):
                    ended.append(self._report(future, len(ended) + 1, say))
            except BaseException:
                lanes.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        return ended

    def _time(self, name: str) -> float:
        return self._times.get(name, UNKNOWN_S)

    def _report(self, future: Future[Ended], count: int, say: Say) -> Ended:
        one = future.result()
        if one.status:
            say(f"--- output of {one.name} ---\n{one.log.read_text(encoding='utf-8', errors='replace')}")
        word = "FAILED" if one.status else "passed"
        say(f"{word} {one.name:38} {clock(one.seconds):>6} {clock(one.cpu_s):>6}   {count:2} of {len(self._names)}")
        return one

    def _run_one(self, name: str) -> Ended:
        started = time.monotonic()
        path = self._logs / f"{name}.log"
        with path.open("wb") as log:
            process = self._start(self._command(name), log.fileno())
            if process is None:
                return Ended(name=name, log=path, status=1, seconds=0.0, cpu_s=0.0)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        with self._changed:
            self._running.discard(process)
            self._changed.notify_all()
        seconds = time.monotonic() - started
        cpu_s = usage.ru_utime + usage.ru_stime
        return Ended(name=name, log=path, status=process.returncode, seconds=seconds, cpu_s=cpu_s)

    def _start(self, command: Sequence[str], log: int) -> subprocess.Popen[bytes] | None:
        """Start a session in a process group of its own; ``None`` when everything was stopped meanwhile."""
        with self._changed:
            if self._is_stopped:
                return None
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            self._running.add(process)
            return process

    def _stop(self) -> None:
        """End what runs, gently first."""
        with self._changed:
            self._is_stopped = True
            groups = [process.pid for process in self._running]
            for group in groups:
                _signal(group, signal.SIGINT)
            self._changed.wait_for(lambda: not self._running, timeout=GRACE_S)
        for group in groups:
            _signal(group, signal.SIGKILL)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def try_failed_again(
    ended: Sequence[Ended], say: Say, *, command: Callable[[str], Sequence[str]], logs: Path = LOGS
) -> list[Ended]:
    """Run the sessions that failed once more, one at a time, if they are few; return how all of them ended at last."""
    failed = {one.name: one for one in ended if one.status}
    if not 0 < len(failed) <= SECOND_TRIES:
        return list(ended)
    say(f"once more, alone: {', '.join(failed)}")
    again = SideBySide(list(failed), lanes=1, command=command, logs=logs / "second-try").run(say)
    second = {one.name: replace(one, first_log=failed[one.name].log) for one in again}
    return [second.get(one.name, one) for one in ended]


def summary(ended: Sequence[Ended], *, seconds: float) -> str:
    """List the sessions that passed and failed, with the commands that repeat the failed ones."""
    failed = [one for one in ended if one.status]
    lines = [f"{len(ended) - len(failed)} of {len(ended)} sessions passed in {clock(seconds)}"]
    if failed:
        lines[0] += f"; {len(failed)} failed. Repeat with:"
        lines += [f'    python3 -m nox -s "{one.name}"      # output: {one.log}' for one in failed]
    if late := [one for one in ended if one.first_log is not None and not one.status]:
        lines.append(
            f"{len(late)} passed only in the second try, so a test or the code depends on chance. What failed:"
        )
        lines += [f"    {one.name}: {one.first_log}" for one in late]
    return "\n".join(lines)


def keep_times(ended: Sequence[Ended]) -> None:
    """Write how long the sessions took, for the next estimate."""
    times = read_times() | {one.name: one.seconds for one in ended if one.first_log is None}
    head = "# Seconds that each session takes on two idle cores with warm caches: nox -s tests -- --keep-times\n"
    lines = [f'"{name}" = {seconds:.0f}' for name, seconds in sorted(times.items(), key=lambda item: -item[1])]
    TIMES.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
