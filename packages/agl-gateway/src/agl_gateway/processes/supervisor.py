"""Runs a gateway in several processes on one port, and keeps them running until a signal ends them.

The parent opens the port and serves nothing itself. All processes take connections from the port's one queue, so no
connection is refused while a process restarts, and idle processes take over from busy ones.
"""

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from agl.errors import AglError, ConfigError
from agl.owned_process import Restarts
from agl.schemas import new_trace_id
from agl_gateway.processes.peers import UNKNOWN, Board, Group

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The objects that a gateway process gets from its parent.

    Attributes:
        group: This process's view of all processes.
        listener: The socket on which all processes listen.
        parent: A file descriptor that reaches its end when the parent ends.
        report: Reports to the parent: before serving, the spool files of this process; once serving, the lines to
            print.
    """

    group: Group
    listener: socket.socket
    parent: int
    report: Callable[..., None]


@dataclass(kw_only=True)
class _Process:
    """A running process, with its unread reports and its start time."""

    pid: int
    started_at: float
    reader: int
    text: bytes = b""
    spools: frozenset[Path] = frozenset()
    is_serving: bool = False


@dataclass(kw_only=True)
class _Slot:
    """One of the supervised processes, by number; when the process ends, its replacement takes over the slot."""

    process: _Process | None = None
    spools: frozenset[Path] = frozenset()
    restarts: Restarts = field(default_factory=Restarts)
    due_at: float = 0.0


@dataclass(kw_only=True)
class Supervisor:
    """Starts processes, restarts those that end, and ends them all on a signal.

    Use it in the main thread of a process without other threads.

    Args:
        count: Number of processes.
        listener: A bound socket that listens.
        serve: The work of each process; it ends on SIGTERM, on SIGINT, and when the parent is gone.
        run_async: Runs the coroutine of ``serve`` in an event loop.
        say: Prints a line.
    """

    count: int
    listener: socket.socket
    serve: Callable[[Place], Coroutine[Any, Any, None]]
    run_async: Callable[[Coroutine[Any, Any, None]], None]
    say: Callable[[str], None]
    _slots: list[_Slot] = field(init=False)
    _signals: int = 0
    _error: str = ""
    _has_served: bool = False
    _failed: int = 0

    def run(self) -> int:
        """Run until all processes have ended; returns the exit status.

        The status is 0 if every process ended because of the signal.

        Raises:
            ConfigError: The first processes could not start; the message is the one that a process reported.
        """
        folder = Path(tempfile.mkdtemp(prefix="agl-"))
        self._folder, self._group_id, self._board = folder, new_trace_id(), Board(self.count)
        self._slots = [_Slot() for _ in range(self.count)]
        self._alive, self._parent = os.pipe()
        os.set_inheritable(self._alive, True)
        self._selector = selectors.DefaultSelector()
        before = self._watch_signals()
        try:
            while not self._signals or any(slot.process for slot in self._slots):
                self._start_due()
                self._look()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            self._end_all(signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
        if self._error and not self._has_served:
            raise ConfigError(self._error)
        return 1 if self._failed else 0

    def _watch_signals(self) -> dict[int, Any]:
        self._woken, waker = socket.socketpair()
        self._waker = waker
        for end in (self._woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        before: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Send SIGTERM to the processes; from the second signal on, send SIGKILL."""
        self._stop(signal.SIGKILL if self._signals else signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        self._signals += 1
        self.listener.close()
        self._end_all(number)

    def _end_all(self, number: signal.Signals) -> None:
        for slot in self._slots:
            if slot.process is not None:
                with suppress(ProcessLookupError):
                    os.kill(slot.process.pid, number)

    def _start_due(self) -> None:
        now = time.monotonic()
        for number, slot in enumerate(self._slots):
            if not self._signals and slot.process is None and slot.due_at <= now:
                self._start(number)

    def _start(self, number: int) -> None:
        reader, writer = os.pipe()
        taken = frozenset[Path]().union(*(slot.spools for slot in self._slots if slot is not self._slots[number]))
        group = Group(number=number, folder=self._folder, board=self._board, group_id=self._group_id, taken=taken)
        self._board.starts += 1
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a signal ends the processes that are known by then
        try:
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                self._be_process(group, writer)
            self._slots[number].process = _Process(pid=pid, started_at=time.monotonic(), reader=reader)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(writer)
        os.set_blocking(reader, False)
        self._selector.register(reader, selectors.EVENT_READ, number)

    def _be_process(self, group: Group, writer: int) -> None:
        """Serve, then exit the process; never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._selector.close()
            os.close(self._parent)
            place = Place(
                group=group,
                listener=self.listener,
                parent=self._alive,
                report=partial(_write, writer),
            )
            self.run_async(self.serve(place))
            status = 0
        except AglError as error:
            _write(writer, error=str(error))
        except KeyboardInterrupt:
            status = 0
        except BaseException:  # noqa: BLE001  # isolation: it ends here, and its parent starts another one
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _look(self) -> None:
        """Wait for a signal, a report or the time of the next restart; then handle reports and ended processes."""
        now = time.monotonic()
        waits = [slot.due_at - now for slot in self._slots if slot.process is None and not self._signals]
        for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
            if key.data is None:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._hear(key.data)
        self._reap()

    def _hear(self, number: int) -> None:
        process = self._slots[number].process
        if process is None:
            return
        with suppress(BlockingIOError):
            process.text += os.read(process.reader, 1 << 16)
        *lines, process.text = process.text.split(b"\n")
        for line in lines:
            self._take(number, process, json.loads(line))

    def _take(self, number: int, process: _Process, report: dict[str, Any]) -> None:
        if "error" in report:
            self._error = report["error"]
        if "spools" in report:
            self._slots[number].spools = frozenset(Path(path) for path in report["spools"])
        if "lines" in report:
            process.is_serving = True
            for line in report["lines"] if not self._has_served else ():
                self.say(line)
            self._has_served = True
            self.say(f"process {number} of {self.count} serves as {process.pid}")

    def _reap(self) -> None:
        """Handle all processes that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            number = next((n for n, slot in enumerate(self._slots) if slot.process and slot.process.pid == pid), None)
            if number is not None:
                self._ended(number, os.waitstatus_to_exitcode(status))

    def _ended(self, number: int, code: int) -> None:
        self._hear(number)
        slot = self._slots[number]
        process, slot.process = slot.process, None
        assert process is not None  # noqa: S101  # the caller found it
        self._selector.unregister(process.reader)
        os.close(process.reader)
        self._board.hold(number, UNKNOWN)
        if self._signals:
            self._failed += code not in (0, -signal.SIGTERM, -signal.SIGINT)
            return
        if not self._has_served:
            self._failed += 1
            self._stop(signal.SIGTERM)
            return
        now = time.monotonic()
        pause_s = slot.restarts.pause_s(ran_s=now - process.started_at)
        slot.due_at = now + pause_s
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        reason = f" ({self._error})" if self._error else ""
        self._error = ""
        who = f"process {number} of {self.count} ({process.pid})"
        self.say(f"{who} {how}{reason}; it is started again in {pause_s:g} s")


def _write(writer: int, **report: Any) -> None:
    """Send a report to the parent as one line of JSON; does nothing if the parent is gone."""
    left = json.dumps(report).encode() + b"\n"
    with suppress(BrokenPipeError):
        while left:
            left = left[os.write(writer, left) :]


def listening(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a listening socket that several processes can share.

    Raises:
        OSError: The address cannot be used.
    """
    family = 0 if host else socket.AF_INET
    found = socket.getaddrinfo(host or None, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def refusal(store_url: str, *, spool: str, max_spans_per_minute: int) -> Sequence[str]:
    """Return why a gateway with these settings cannot run in several processes; empty if it can."""
    reasons: list[str] = []
    if not hasattr(os, "fork") or sys.platform == "win32":
        reasons.append("this system cannot start processes that share a port; start several gateways behind a balancer")
    if store_url.startswith("memory:"):
        reasons.append("the store is in memory, and each process would have a separate one; use sqlite:///runs.db")
    if spool == "off":
        reasons.append("only their spools say which calls a process has that was killed; take away --spool off")
    if max_spans_per_minute:
        reasons.append(
            "each process would count to --max-spans-per-minute by itself; use --base-rate, on which all agree"
        )
    return reasons
