"""A program in a process of its own: started, given orders, watched, and started again when it ends or hangs.

A trainer that builds rows and computes losses answers late in all of its event loops, whichever thread they have; a
process of its own serves calls meanwhile. It is started as a program, not forked, because a trainer has threads.

The listening socket stays with the owner: while the program is started again, calls wait in the socket's queue, and
those that were under way are broken off and sent again by their clients. Owner and program share a socket pair, over
which each sends lines of JSON: the owner orders, the program notes, and the note that answers an order has its number.

The program has a session of its own, so that a terminal's signals reach its owner alone, and it ends with its owner
however that ends, ``kill -9`` included.
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
"""Largest line in bytes; the upstreams of thousands of replicas fit."""

START_S = 120.0
"""Seconds within which a program must be ready; idle it takes about one."""

END_S = 2.0
"""Seconds in which a program ends by itself that has closed its end of the socket pair."""

BEAT_S = 1.0
"""Seconds between an answer and the next question whether the program lives."""

HEALTH_S = 15.0
"""Seconds in which the program must answer that question."""

SILENCES = 2
"""Questions in a row without an answer after which the program is ended; one may be due to an owner that was busy."""

QUICK_ENDS = 5
"""Ends in a row, each soon after the start, after which an owner that gives up does so."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
STEADY_S = 30.0
"""Seconds after which a program that ends is started again at once, whatever came before."""

OWNER_S = 1.0
"""Seconds between looks at the owner, whose forked children may hold the socket pair open when it is gone."""

_LAST_WORDS = 2_000
"""Last characters of the program's errors that a message quotes."""

_log = logging.getLogger(__name__)


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line between owner and program.

    Attributes:
        number: Of an order, and of the note that answers it; 0 for news that answer nothing.
    """

    number: int = 0


OrderT = TypeVar("OrderT", bound=Message)
NoteT = TypeVar("NoteT", bound=Message)


class Restarts:
    """The pauses before a process that ends is started again: longer each time, and short after a steady run."""

    def __init__(self) -> None:
        self.quick_ends = 0

    def pause_s(self, *, ran_s: float) -> float:
        """Return the pause after a process that ran for ``ran_s`` seconds."""
        self.quick_ends = 1 if ran_s > STEADY_S else self.quick_ends + 1
        return min(FIRST_PAUSE_S * 2 ** (self.quick_ends - 1), LONGEST_PAUSE_S)


class OwnedProcess(Generic[OrderT, NoteT]):
    """The owner's side; all methods belong to one event loop.

    Args:
        program: Its command. Gets three more arguments: the file descriptors of the listening socket and of its end of
            the socket pair, and the owner's process id.
        name: What messages call it, such as ``the gateway's process``.
        note: The type of its notes.
        error: The type of the errors of this class.
        begin: Returns the first order of every start; the program is ready when it has answered it.
        beat: Returns the order that asks whether it lives.
        take: Gets every note, before the order is answered that it belongs to. An error that it raises for a note with
            a number is raised where the order was given.
        environment: Variables of the program besides the owner's.
        health_s: Seconds in which it must answer a ``beat``; asked again once before it is ended.
        give_up: Called with the last error once the program ended ``QUICK_ENDS`` times in a row soon after its start,
            and it is not started again; without it, it is always started again.

    Attributes:
        restarts: How often it was started again.
        last_words: What is known of its last end.
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
        """Id of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def start(self, listener: socket.socket) -> NoteT:
        """Start it at a socket that listens already; returns its answer to the first order. `stop` closes the socket.

        Raises the error that ``take`` raises for that answer, or one with the program's last words where it ends first.
        """
        self._listener = listener
        self._over.clear()
        note = await self._launch()
        self._watching = asyncio.create_task(self._watch())
        return note

    async def stop(self, order: OrderT, *, within_s: float) -> NoteT | None:
        """Give the order to end, and wait for the end; returns the answer, None where there is none. Idempotent."""
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
        """Send an order that nothing waits for; without a process it is lost, and ``begin`` makes up for it."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_line(order))

    async def ask(self, order: OrderT) -> NoteT | None:
        """Give an order; returns the answer, or None if no process is there or it ends first.

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
        """Start the program and give it the first order; returns its answer."""
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
        """Follow the program, and start it again when it ends."""
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
        """Return once the program has ended, also where it is ended because it hangs."""
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
        """Ask the program again and again whether it lives, and end it when it does not answer."""
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
        """Take the program's notes until its end of the socket pair closes."""
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
        """Tidy up after the process, which is made to end; returns what to say of it."""
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
    """The program's side of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, order: type[OrderT]) -> None:
        self._reader, self._writer, self._order = reader, writer, order
        self._jobs = set[asyncio.Task[None]]()

    async def orders(self) -> AsyncIterator[OrderT]:
        """Yield the owner's orders; ends the process at once when the owner is gone."""
        while text := await self._reader.readline():
            yield msgspec.json.decode(text, type=self._order)
        os._exit(0)

    def say(self, note: NoteT) -> None:
        """Send a note."""
        with contextlib.suppress(ConnectionError):  # the owner is gone; `orders` finds that out
            self._writer.write(_line(note))

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Carry out an order while others arrive."""
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def close(self) -> None:
        """Send what was said, and hang up."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        self._writer.close()


def run_owned(
    main: Callable[[socket.socket, Owner[OrderT, NoteT]], Coroutine[Any, Any, None]], *, order: type[OrderT]
) -> None:
    """Run ``main`` with the listening socket and the owner, as the program that :class:`OwnedProcess` starts.

    It returns when ``main`` does, and ends the process when its owner is gone, even if its event loop hangs.
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
