"""Runs a program in a process of its own: starts it, sends it orders, and restarts it if it ends or hangs.

A trainer that builds rows and computes losses is slow to answer in all of its event loops and threads, so calls are
served by a program in another process. It is started as a new program, not forked, because a trainer has threads.

The listening socket belongs to the owner. While the program restarts, new calls wait in the socket's queue; calls that
were in flight fail, and their clients send them again. Owner and program exchange lines of JSON over a socket pair:
the owner sends orders and the program sends notes. A note that answers an order has the number of that order.

The program runs in its own session, so that a terminal's signals reach only the owner. It ends when its owner ends,
even if the owner was killed with ``kill -9``.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import IO, Any, Generic, TypeVar

import msgspec

from agl.errors import AglError

__all__ = ["HEALTH_S", "Message", "OwnedProcess", "Owner", "Restarts", "run_owned"]

LONGEST = 2**24
"""The most bytes of a line between owner and program; an order with thousands of replicas fits."""

START_S = 120.0
"""Seconds in which a started program must become ready; on an idle machine it takes about one."""

END_S = 2.0
"""Seconds between the end of the socket pair and killing a program that has not exited."""

BEAT_S = 1.0
"""Seconds between an answer to a health check and the next check."""

HEALTH_S = 15.0
"""Default number of seconds in which the program must answer a health check."""

SILENCES = 2
"""The program is killed after this many unanswered health checks in a row; a busy owner may miss one answer."""

QUICK_ENDS = 5
"""After this many quick ends in a row, the program is not restarted if there is a ``give_up``."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
STEADY_S = 30.0
"""Seconds of running after which earlier quick ends no longer count, so that the next restart comes soon."""

OWNER_S = 1.0
"""Seconds between the program's checks that its owner lives.

The socket pair does not show the owner's end, because forked children of the owner may keep the pair open.
"""

_LAST_WORDS = 2_000
"""A message quotes at most this many characters from the end of the program's error output."""

_log = logging.getLogger(__name__)


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message between owner and program, sent as one line of JSON.

    Attributes:
        number: Number of an order, repeated in the note that answers it; 0 for a note that answers no order.
    """

    number: int = 0


OrderT = TypeVar("OrderT", bound=Message)
NoteT = TypeVar("NoteT", bound=Message)


class Restarts:
    """Computes the pause before a restart: longer after each quick end, and short after a long run."""

    def __init__(self) -> None:
        self.quick_ends = 0

    def pause_s(self, *, ran_s: float) -> float:
        """Return the seconds to wait before a restart, after a process that ran for ``ran_s`` seconds."""
        self.quick_ends = 1 if ran_s > STEADY_S else self.quick_ends + 1
        # The power is bounded: after about a thousand ends in a row it would no longer fit a float.
        return min(FIRST_PAUSE_S * 2 ** min(self.quick_ends - 1, 30), LONGEST_PAUSE_S)


class OwnedProcess(Generic[OrderT, NoteT]):
    """A program in another process, as its owner sees it. Call all methods in one event loop.

    Args:
        program: The program's command. It gets three more arguments: the file descriptors of the listening socket and
            of the program's end of the socket pair, and the owner's process id.
        name: The program's name in messages, such as ``the gateway's process``.
        note: The type of the program's notes.
        error: The type of the errors of this class.
        begin: Returns the first order after every start; the program is ready once it has answered this order.
        beat: Returns the order that serves as a health check.
        take: Called with every note, before a waiting :meth:`ask` returns it. If it raises an :class:`AglError` for the
            answer to an order, :meth:`ask` raises that error.
        environment: Environment variables of the program, in addition to the owner's.
        health_s: Seconds within which the program must answer a health check; it is killed after ``SILENCES`` misses.
        give_up: Called with the last error after the program ended ``QUICK_ENDS`` times in a row soon after its start;
            the program is then not restarted. ``None`` to restart it always.

    Attributes:
        restarts: Number of restarts.
        last_words: Description of the program's last end.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        name: str,
        note: type[NoteT],
        error: type[AglError],
        begin: Callable[[], OrderT],
        beat: Callable[[], OrderT],
        take: Callable[[NoteT], None],
        environment: Mapping[str, str] | None = None,
        health_s: float = HEALTH_S,
        give_up: Callable[[AglError], None] | None = None,
    ) -> None:
        self.program = tuple(program)
        self._name, self._note, self._error = name, note, error
        self._first, self._beat, self._take = begin, beat, take
        self._environment, self._health_s, self._give_up = environment or {}, health_s, give_up
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._errors: IO[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[NoteT | None]] = {}
        self._numbers = itertools.count(1)
        self._over = asyncio.Event()
        self.restarts = 0
        self.last_words = ""

    @property
    def pid(self) -> int:
        """The process id; 0 while there is no process."""
        return self._process.pid if self._process is not None else 0

    async def start(self, listener: socket.socket) -> NoteT:
        """Start the program with a socket that already listens; returns the answer to the first order.

        :meth:`stop` closes the socket. Raises the error that ``take`` raises for the answer, or, if the program ends
        before it answers, an error that quotes the end of the program's error output.
        """
        self._listener = listener
        self._over.clear()
        note = await self._launch()
        self._watching = asyncio.create_task(self._watch())
        return note

    async def stop(self, order: OrderT, *, within_s: float) -> NoteT | None:
        """Order the program to end, and wait for its end; returns its answer, or ``None`` without one. Idempotent."""
        self._over.set()
        note, process, watching = None, self._process, self._watching
        if process is not None:
            try:
                async with asyncio.timeout(within_s):
                    note = await self.ask(order)
                    await asyncio.to_thread(process.wait, within_s)
            except (TimeoutError, subprocess.TimeoutExpired):
                _log.warning("%s does not end, and is killed", self._name)
                process.kill()
        if watching is not None:
            await watching
        if self._listener is not None:
            self._listener.close()
        self._listener = self._watching = None
        return note

    def send(self, order: OrderT) -> None:
        """Send an order without waiting for an answer.

        Without a process the order is lost; the first order after the next start must include its content.
        """
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_line(order))

    async def ask(self, order: OrderT) -> NoteT | None:
        """Send an order and return the answer; ``None`` if there is no process, or if it ends before it answers.

        Raises the error that ``take`` raises for the answer.
        """
        if self._reading is None or self._reading.done():
            return None
        number = next(self._numbers)
        self._answers[number] = answered = asyncio.get_running_loop().create_future()
        self.send(msgspec.structs.replace(order, number=number))
        try:
            return await answered
        finally:
            self._answers.pop(number, None)

    async def _launch(self) -> NoteT:
        """Start the program, send it the first order, and return the answer."""
        if self._listener is None:
            raise AssertionError("a program starts with a socket")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_ended` closes it
        mine, its = socket.socketpair()
        numbers = self._listener.fileno(), its.fileno()
        with its:
            self._process = await asyncio.to_thread(
                subprocess.Popen,
                [*self.program, *map(str, (*numbers, os.getpid()))],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=mine, limit=LONGEST)
        self._reading = asyncio.create_task(self._read(reader))
        try:
            async with asyncio.timeout(START_S):
                note = await self.ask(self._first())
        except TimeoutError:
            note = None
        except AglError:
            await self._ended()
            raise
        if note is None:
            raise await self._ended()
        return note

    async def _watch(self) -> None:
        """Watch the program, and restart it whenever it ends."""
        restarts, began, error = Restarts(), time.monotonic(), None
        while True:
            if error is None:
                await self._follow()
                error = await self._ended()
            if self._over.is_set():
                return
            pause_s = restarts.pause_s(ran_s=time.monotonic() - began)
            self.last_words = str(error)
            if self._give_up is not None and restarts.quick_ends >= QUICK_ENDS:
                self._give_up(error)
                return
            _log.warning("%s; it is started again in %g s", error, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), pause_s)
                return
            self.restarts += 1
            began, error = time.monotonic(), None
            try:
                await self._launch()
            except AglError as failure:
                error = failure

    async def _follow(self) -> None:
        """Watch the running program until it ends, and kill it if it hangs."""
        process, reading = self._process, self._reading
        if process is None or reading is None:
            raise AssertionError("only a program that was started is followed")
        if self._over.is_set():  # it was started while its owner stopped, and has heard of no order to end
            process.kill()
        tending = asyncio.create_task(self._tend(process))
        try:
            await reading
        finally:
            tending.cancel()

    async def _tend(self, process: subprocess.Popen[bytes]) -> None:
        """Check the program's health repeatedly, and kill the program if it stops answering."""
        silences = 0
        while silences < SILENCES:
            try:
                async with asyncio.timeout(self._health_s):
                    await self.ask(self._beat())
            except TimeoutError:
                silences += 1
            else:
                silences = 0
                await asyncio.sleep(BEAT_S)
        _log.warning("%s does not answer; it is ended", self._name)
        process.kill()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Handle the program's notes until the program closes its end of the socket pair."""
        try:
            with contextlib.suppress(ConnectionError):
                while text := await reader.readline():
                    self._hear(msgspec.json.decode(text, type=self._note))
        finally:
            for answered in self._answers.values():
                if not answered.done():
                    answered.set_result(None)

    def _hear(self, note: NoteT) -> None:
        answered = self._answers.get(note.number)
        try:
            self._take(note)
        except AglError as error:
            if answered is not None and not answered.done():
                answered.set_exception(error)
        else:
            if answered is not None and not answered.done():
                answered.set_result(note)

    async def _ended(self) -> AglError:
        """Make sure that the process has ended and clean up; returns an error that describes its end."""
        process, errors, writer, reading = self._process, self._errors, self._writer, self._reading
        if process is None or errors is None or writer is None or reading is None:
            raise AssertionError("only a process that was started ends")
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, END_S)
        process.kill()
        code = await asyncio.to_thread(process.wait)
        writer.close()
        await reading
        self._writer = self._process = self._reading = None
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace")[-_LAST_WORDS:].strip()
        errors.close()
        return self._error(f"{self._name} {process.pid} ended with {code}{f': {said}' if said else ''}")


class Owner(Generic[OrderT, NoteT]):
    """The program's end of the connection to its owner."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, order: type[OrderT]) -> None:
        self._reader, self._writer, self._order = reader, writer, order
        self._jobs = set[asyncio.Task[None]]()

    async def orders(self) -> AsyncIterator[OrderT]:
        """Yield the owner's orders; if the owner is gone, end this process at once."""
        while text := await self._reader.readline():
            yield msgspec.json.decode(text, type=self._order)
        os._exit(0)

    def say(self, note: NoteT) -> None:
        """Send a note."""
        with contextlib.suppress(ConnectionError):  # the owner is gone; `orders` finds that out
            self._writer.write(_line(note))

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which carries out an order, in the background, so that further orders can arrive."""
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def close(self) -> None:
        """Send all pending notes, and close the connection."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        self._writer.close()


def run_owned(
    main: Callable[[socket.socket, Owner[OrderT, NoteT]], Coroutine[Any, Any, None]], *, order: type[OrderT]
) -> None:
    """Run ``main`` with the listening socket and the owner, in the program that :class:`OwnedProcess` starts.

    Returns when ``main`` does. When the owner is gone, the process ends, even if its event loop hangs.
    """
    listener, control, owner = map(int, sys.argv[1:4])

    async def run() -> None:
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=control), limit=LONGEST)
        end = Owner[OrderT, NoteT](reader, writer, order=order)
        await main(socket.socket(fileno=listener), end)
        await end.close()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what a Ctrl-C means
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    asyncio.run(run())


def _end_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(OWNER_S)
    os._exit(0)


def _line(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"
