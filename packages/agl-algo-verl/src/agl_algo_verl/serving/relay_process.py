"""The relay in a process of its own, as its owner uses it: started, ordered, watched and started again.

A trainer that is busy with rows and losses answers late in its event loops, whichever thread they have; a process of
its own passes calls on meanwhile. The listening socket stays here. While the process is started again after its end,
calls wait in the socket's queue; those that were under way are broken off and their clients ask again.

A process that hangs is found by a question that it must answer within a deadline, and is started again likewise.

The process has a session of its own, so that the signals of a terminal reach its owner alone. It ends with its owner
however that ends: its end of the control socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import IO, TYPE_CHECKING, Any

import msgspec

from agl.contracts import POLICY_KEY_ENV
from agl.errors import PolicyError
from agl_algo_verl.serving.relay import DRAIN_S
from agl_algo_verl.serving.relay_lines import LONGEST, Note, Order, line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from agl_algo_verl.serving.relay import Backend

PROGRAM = (sys.executable, "-m", "agl_algo_verl.serving.relay_program")
"""The command of the process, before its arguments."""

START_S = 120.0
"""Seconds within which the process must be ready; idle it takes less than one."""

STARTS = 5
"""Ends in a row, each within `SOON_S` seconds of the start, after which the process is not started again."""

SOON_S = 10.0
PAUSE_S = 0.1
"""Seconds before the process is started again; doubled each time in a row."""

END_S = 2.0
"""Seconds in which a process ends by itself that has closed its end of the control socket."""

HEALTH_S = 15.0
"""Seconds in which the process must answer the question for its health, and between an answer and the next question."""

SILENCES = 2
"""Questions in a row without an answer after which the process is ended; one may be due to an owner that was busy."""

_TOLD = 2_000
"""Last characters of the process's errors that a message quotes."""

_log = logging.getLogger(__name__)


class RelayProcess:
    """Does what `ReplicaRelay` does, in another process; all methods belong to one event loop.

    Args:
        home: Returns the server of calls while there are no replicas, and may start it.
        key: API key that calls must bring.
        program: The command of the process.

    Attributes:
        lost: Set while none of the replicas can be reached and calls wait for others, and after a `failure`.
        calls: Answers of each replica, by its URL, as of the last `count`.
        failures: How often each could not be reached, likewise.
        restarts: How often the process was started again.
        failure: Why it was not started again any more; None while it runs.
    """

    def __init__(self, home: Callable[[], Awaitable[Backend]], *, key: str, program: Sequence[str] = PROGRAM) -> None:
        self._home, self._key, self._program = home, key, tuple(program)
        self._backend: Backend | None = None
        self._is_held = self._is_over = False
        self._use = 0  # number of the newest order of this kind, so that news of earlier replicas is told apart
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._errors: IO[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._jobs = set[asyncio.Task[None]]()
        self._earlier = Counter[str](), Counter[str]()  # calls and failures of processes that have ended
        self.lost = asyncio.Event()
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.restarts = 0
        self.failure: PolicyError | None = None

    @property
    def pid(self) -> int:
        """Id of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def start(self, listener: socket.socket) -> None:
        """Answer calls that arrive at a socket that listens already; closes it in the end.

        Raises PolicyError with the process's last words where it does not start.
        """
        self._listener = listener
        reader = await self._launch()
        self._watching = asyncio.create_task(self._watch(reader))

    def use(self, backend: Backend | None) -> None:
        """Send calls to these servers from now on, or home; see `ReplicaRelay.use`."""
        self._backend = backend
        if backend is not None and self.failure is None:
            self.lost.clear()
        self._is_held = self.lost.is_set()
        self._use = next(self._numbers)
        self._send(self._state())

    async def hold(self) -> None:
        """Hold new calls until `use` or `stop`; returns once none is under way."""
        self._is_held = True
        await self._ask(Order(kind="hold", number=next(self._numbers)))

    async def count(self) -> None:
        """Bring `calls` and `failures` up to date."""
        await self._ask(Order(kind="count", number=next(self._numbers)))

    async def stop(self) -> None:
        """Stop listening, after the calls under way; those that are held are refused. Idempotent."""
        self._is_over = True
        self._send(Order(kind="stop"))
        process, watching = self._process, self._watching
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, DRAIN_S + SOON_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if watching is not None:
            await watching
        for job in tuple(self._jobs):
            job.cancel()
        if self._listener is not None:
            self._listener.close()

    def _state(self) -> Order:
        return Order(kind="use", number=self._use, backend=self._backend, is_held=self._is_held)

    async def _launch(self) -> asyncio.StreamReader:
        """Start the process and give it its orders; raises PolicyError where it does not get ready."""
        if self._listener is None:
            raise AssertionError("a relay starts with a socket")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_ended` closes it
        mine, its = socket.socketpair()
        numbers = (self._listener.fileno(), its.fileno())
        with its:
            self._process = await asyncio.to_thread(
                subprocess.Popen,
                [*self._program, *map(str, (*numbers, os.getpid()))],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, POLICY_KEY_ENV: self._key},
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=mine, limit=LONGEST)
        self._send(self._state())
        if self._is_over:
            self._send(Order(kind="stop"))
        try:
            async with asyncio.timeout(START_S):
                ready = await reader.readline()
        except (TimeoutError, ConnectionError):
            ready = b""
        if not ready:
            raise await self._ended()
        return reader

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Follow the process, and start it again when it ends too early."""
        quick, began = 0, time.monotonic()
        while True:
            await self._listen(reader)
            error = await self._ended()
            while not self._is_over:
                quick = quick + 1 if time.monotonic() - began < SOON_S else 0
                if quick >= STARTS:
                    self.failure = error
                    self.lost.set()
                    return
                _log.warning("%s It is started again.", error)
                await asyncio.sleep(PAUSE_S * 2**quick)
                self.restarts += 1
                began = time.monotonic()
                try:
                    reader = await self._launch()
                    break
                except PolicyError as ended:
                    error = ended
            else:
                return

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Follow the process's notes until it ends, or is ended because it hangs."""
        asking = asyncio.create_task(self._end_when_silent())
        try:
            with contextlib.suppress(ConnectionError):
                while text := await reader.readline():
                    self._take(msgspec.json.decode(text, type=Note))
        finally:
            asking.cancel()

    async def _end_when_silent(self) -> None:
        """Ask the process for its counts again and again, and end it when it does not answer."""
        silences = 0
        while silences < SILENCES:
            order = Order(kind="count", number=next(self._numbers))
            try:
                await asyncio.wait_for(self._ask(order), HEALTH_S)
            except TimeoutError:
                self._answers.pop(order.number, None)
                silences += 1
            else:
                silences = 0
                await asyncio.sleep(HEALTH_S)
        if self._process is not None:
            _log.warning("the process that passes calls on to VERL's replicas does not answer; it is ended.")
            self._process.kill()

    def _take(self, note: Note) -> None:
        match note.kind:
            case "home":
                self._begin(self._answer_home(note.number))
            case "lost" if note.number == self._use:
                self._is_held = True
                self.lost.set()
            case "done":
                self.calls = self._earlier[0] + Counter(note.calls)
                self.failures = self._earlier[1] + Counter(note.failures)
                self._answered(note.number)
            case _:
                pass

    async def _answer_home(self, number: int) -> None:
        try:
            self._send(Order(kind="home", number=number, backend=await self._home()))
        except Exception as error:  # noqa: BLE001 - isolation point: the agent learns why no model serves
            self._send(Order(kind="home", number=number, error=str(error)))

    async def _ask(self, order: Order) -> None:
        """Give an order and return when it is done, or when no process is left to do it."""
        if self._writer is None or self._writer.is_closing():
            return  # no call is under way, and the next process starts with the state that this one was to have
        self._answers[order.number] = answered = asyncio.get_running_loop().create_future()
        self._send(order)
        await answered

    def _answered(self, number: int) -> None:
        answer = self._answers.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_result(None)

    async def _ended(self) -> PolicyError:
        """Tidy up after the process, which is made to end; returns what to say of it."""
        process, errors = self._process, self._errors
        if process is None or errors is None or self._writer is None:
            raise AssertionError("only a process that was started ends")
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, END_S)
        process.kill()
        code = await asyncio.to_thread(process.wait)
        self._writer.close()
        self._earlier = self.calls.copy(), self.failures.copy()
        for number in tuple(self._answers):
            self._answered(number)  # with the process every call that was under way has ended
        errors.seek(0)
        told = errors.read().decode("utf-8", "replace")[-_TOLD:].strip()
        errors.close()
        self._process = None
        return PolicyError(
            f"the process that passes calls on to VERL's replicas ended with {code}{f': {told}' if told else ''}."
        )

    def _send(self, order: Order) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line(order))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
