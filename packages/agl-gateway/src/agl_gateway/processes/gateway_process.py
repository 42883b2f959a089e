"""A gateway in a process of its own, as the experiment uses it: started, ordered, watched and started again.

A trainer that builds rows and computes losses answers late in all of its event loops, whichever thread they have; a
process of its own passes calls on meanwhile. It is started as a program, not forked, because a trainer has threads.

The listening socket stays with the trainer: while the process is started again, calls wait in the socket's queue, and
those that were under way are broken off and sent again by their clients. What it acknowledged is in the store or in its
spool, which the next process takes over. A process that hangs is found by a question that it must answer in time.

It has a session of its own, so that a terminal's signals reach the trainer alone, and ends with the trainer however
that ends.
"""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Literal

import msgspec

from agl.contracts import Store, Upstream
from agl.errors import AglError, CaptureError, ConfigError
from agl_gateway.processes.loop_thread import LoopThread
from agl_gateway.processes.supervisor import Restarts, listening
from agl_gateway.record.spool_file import OFF
from agl_gateway.relay.routing import Router
from agl_gateway.service import BACKLOG, bind_error
from agl_gateway.settings import Settings
from agl_gateway.store_api.contract import Fault, error_of
from agl_gateway.traffic.arms import with_distinct_names
from agl_run.access import Secret

LONGEST = 2**24
"""Largest line in bytes; the upstreams of thousands of replicas fit."""


class GateState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a policy's calls: held or not, and the version and model that they have; ``""`` as at the start."""

    is_paused: bool = False
    model_version: str = ""
    model: str = ""


class Beginning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that a process needs to serve.

    Attributes:
        plugins: Environment that makes it load the same plugins.
        keys: Keys of attempt tokens, one a line.
        gates: State of the policies that were paused or resumed before.
    """

    store_url: str
    settings: Settings
    keys: bytes
    upstreams: tuple[Upstream, ...]
    plugins: dict[str, str] = {}
    gates: dict[str, GateState] = {}


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the owner: ``begin``, ``pause`` or ``resume`` a policy, ``settle`` an attempt, say that you live, ``stop``.

    Attributes:
        name: The policy, or the attempt's id.
        drain_s: Seconds that a pause waits for calls under way.
        gate: What calls carry after ``resume``.
        keys: New keys of attempt tokens, with ``beat``; empty for the ones before.
    """

    kind: Literal["begin", "pause", "resume", "settle", "beat", "stop"]
    number: int = 0
    beginning: Beginning | None = None
    name: str = ""
    drain_s: float = 0.0
    gate: GateState | None = None
    keys: bytes = b""


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the process: an order is ``done``, or a line for the ``log``.

    Attributes:
        text: The URL after ``begin``, the last words after ``stop``; the line.
        fault: The error for which the order could not be carried out.
        logger: Name of the line's logger.
        level: Number of the line's level.
    """

    kind: Literal["done", "log"]
    number: int = 0
    text: str = ""
    fault: Fault | None = None
    logger: str = ""
    level: int = 0


def line(message: Order | Note) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"


PROGRAM = (sys.executable, "-m", "agl_gateway.processes.program")
"""The command of the process, before its arguments."""

START_S = 120.0
"""Seconds within which the process must serve; idle it takes about one."""

STOP_S = 60.0
"""Seconds within which it must have written what it has, and ended."""

END_S = 2.0
"""Seconds in which a process ends by itself that has closed its end of the control socket."""

BEAT_S = 1.0
HEALTH_S = 15.0
SILENCES = 2
"""Questions in a row without an answer after which it is ended; one may be due to a trainer that was busy."""

PATIENCE_S = 120.0
"""Seconds that an attempt's end waits for a process that is started again."""

_ASK_AGAIN_S = 0.1
_LAST_WORDS = 2_000
"""Last characters of the process's errors that a message quotes."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class GatewayProcess:
    """Implements :class:`agl.contracts.Gateway` with a process of its own. May be called from any event loop.

    Attributes:
        store_url: The store, which the process opens by itself.
        settings: The gateway's settings, with a folder for its spool.
        plugins: Environment that makes the process load the same plugins.
        program: The command of the process.
        health_s: Seconds in which it must answer the question whether it lives; asked again once before it is ended.
        restarts: How often the process was started again.
    """

    store_url: str
    settings: Settings
    plugins: Mapping[str, str] | None = None
    program: Sequence[str] = PROGRAM
    health_s: float = HEALTH_S

    def __post_init__(self) -> None:
        self._upstreams: tuple[Upstream, ...] = ()
        self._thread = LoopThread("agl-gateway")
        self._secret: Secret = b""
        self._gates: dict[str, GateState] = {}
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._errors: IO[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Note | None]] = {}
        self._over = asyncio.Event()
        self._last_words = ""
        self.restarts = 0

    @property
    def pid(self) -> int:
        """Id of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def start(self, *, store: Store, upstreams: Sequence[Upstream], secret: Secret) -> str:
        """Listen; returns the base URL without ``/v1``. The process opens its own store, not this object.

        Raises:
            ConfigError: The address is taken, an upstream cannot be served, or the process cannot use a setting.
        """
        del store
        if self._thread.is_running:
            raise CaptureError("this gateway is already running; stop it first, or create another one")
        names = Router(with_distinct_names(upstreams)).targets
        self._gates = {name: GateState() for name in names}
        self._secret, self._over = secret, asyncio.Event()
        self._upstreams = tuple(upstreams)
        self._thread.start()
        try:
            return await self._thread.run(self._start)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Let the process write what is recorded, then end it; idempotent."""
        if not self._thread.is_running:
            return
        try:
            await self._thread.run(self._stop)
        finally:
            await self._thread.stop()

    async def pause(self, policy: str, *, drain_s: float = 30.0) -> None:
        """Hold new calls of ``policy`` and wait up to ``drain_s`` seconds for those in flight."""
        self._set_gate(policy, is_paused=True)
        # A process that ends leaves no call in flight, and the next one begins with the policy on hold.
        await self._tell(Order(kind="pause", name=policy, drain_s=drain_s))

    async def resume(self, policy: str, *, model_version: str = "", model: str = "") -> None:
        """Let held calls through; they carry ``model_version`` and ask the backend for ``model``."""
        gate = self._set_gate(policy, is_paused=False, model_version=model_version, model=model)
        await self._tell(Order(kind="resume", name=policy, gate=gate))

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store, also if the process has to be started again.

        Raises:
            CaptureError: The store refused some of the calls, or no process serves again in time.
        """
        self._require_running()
        await self._thread.run(lambda: self._settle(attempt_id))

    async def _start(self) -> str:
        where = self.settings.host, self.settings.port
        try:
            self._listener = listening(*where, backlog=BACKLOG)
        except OSError as error:
            raise bind_error(*where, error) from error
        reader, url = await self._launch()
        self._watching = asyncio.create_task(self._watch(reader))
        return url

    async def _stop(self) -> None:
        self._over.set()
        process, watching, listener = self._process, self._watching, self._listener
        if process is not None:
            try:
                async with asyncio.timeout(STOP_S):
                    note = await self._ask(Order(kind="stop"))
                    if note is not None and note.text:
                        _log.warning("%s", note.text)
                    await asyncio.to_thread(process.wait, STOP_S)
            except (TimeoutError, subprocess.TimeoutExpired):
                _log.warning("the gateway's process does not end, and is killed; its spool keeps its calls")
                process.kill()
        if watching is not None:
            await watching
        if listener is not None:
            listener.close()
        self._listener = self._watching = None

    def _require_running(self) -> None:
        if not self._thread.is_running:
            raise CaptureError("the gateway is not running; start it first")

    def _set_gate(self, policy: str, *, is_paused: bool, model_version: str = "", model: str = "") -> GateState:
        """Note the state of a policy, for this process and the next ones."""
        self._require_running()
        if policy not in self._gates:
            raise ConfigError(f"the gateway serves no policy {policy!r}; it serves {sorted(self._gates)}")
        known = self._gates[policy]
        self._gates[policy] = gate = GateState(
            is_paused=is_paused,
            model_version=model_version or known.model_version,
            model=model or known.model,
        )
        return gate

    async def _tell(self, order: Order) -> None:
        """Give an order, and return once it is carried out or the process has ended."""
        await self._thread.run(lambda: self._ask(order))

    async def _settle(self, attempt_id: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if await self._ask(Order(kind="settle", name=attempt_id)) is not None:
                return
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"the gateway's process, which may hold calls of attempt {attempt_id!r}, does not come back: "
                    f"{self._last_words}"
                )
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _launch(self) -> tuple[asyncio.StreamReader, str]:
        """Start the process; returns where its notes arrive, and the URL at which it serves.

        Raises the error that it names, or :class:`CaptureError` with its last words.
        """
        if self._listener is None:
            raise AssertionError("a gateway starts with a socket")
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
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=mine, limit=LONGEST)
        beginning = Beginning(
            store_url=self.store_url,
            settings=self.settings,
            keys=self._keys(),
            upstreams=self._upstreams,
            plugins=dict(self.plugins or {}),
            gates=dict(self._gates),
        )
        order = Order(kind="begin", number=next(self._numbers), beginning=beginning)
        self._send(order)
        try:
            async with asyncio.timeout(START_S):
                note = await self._answer_to(order.number, reader)
        except (TimeoutError, ConnectionError):
            note = None
        if note is None:
            raise await self._ended()
        if note.fault is not None:
            await self._ended()
            raise error_of(note.fault)
        return reader, note.text

    async def _answer_to(self, number: int, reader: asyncio.StreamReader) -> Note | None:
        """Return the note that answers an order; ``None`` if the process ends first."""
        while text := await reader.readline():
            note = msgspec.json.decode(text, type=Note)
            if note.number == number:
                return note
            self._take(note)
        return None

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Follow the process, and start it again when it ends."""
        restarts, began, error = Restarts(), time.monotonic(), None
        while True:
            if error is None:
                await self._listen(reader)
                error = await self._ended()
            if self._over.is_set():
                return
            pause_s = restarts.pause_s(ran_s=time.monotonic() - began)
            self._last_words = str(error)
            _log.warning("%s; it is started again in %g s", error, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), pause_s)
                return
            self.restarts += 1
            began, error = time.monotonic(), None
            try:
                reader, _ = await self._launch()
            except AglError as failure:
                error = failure

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Follow the process's notes until it ends, or is ended because it hangs."""
        tending = asyncio.create_task(self._tend())
        try:
            with contextlib.suppress(ConnectionError):
                while text := await reader.readline():
                    self._take(msgspec.json.decode(text, type=Note))
        finally:
            tending.cancel()

    async def _tend(self) -> None:
        """Give the process new keys, and end it when it does not answer."""
        silences, known = 0, self._keys()
        while silences < SILENCES:
            keys = self._keys()
            try:
                async with asyncio.timeout(self.health_s):
                    await self._ask(Order(kind="beat", keys=b"" if keys == known else keys))
            except TimeoutError:
                silences += 1
            else:
                silences, known = 0, keys
                await asyncio.sleep(BEAT_S)
        if self._process is not None:
            _log.warning("the gateway's process does not answer; it is ended")
            self._process.kill()

    def _keys(self) -> bytes:
        return self._secret if isinstance(self._secret, bytes) else self._secret()

    def _take(self, note: Note) -> None:
        if note.kind == "log":
            logging.getLogger(note.logger).log(note.level, "%s", note.text)
        else:
            self._answered(note.number, note)

    async def _ask(self, order: Order) -> Note | None:
        """Give an order; returns the answer, or ``None`` if no process is there or it ends first.

        Raises the error for which the order could not be carried out.
        """
        if self._writer is None or self._writer.is_closing():
            return None
        numbered = msgspec.structs.replace(order, number=next(self._numbers))
        self._answers[numbered.number] = answered = asyncio.get_running_loop().create_future()
        self._send(numbered)
        try:
            note: Note | None = await answered
        finally:
            self._answers.pop(numbered.number, None)
        if note is not None and note.fault is not None:
            raise error_of(note.fault)
        return note

    def _answered(self, number: int, note: Note | None) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(note)

    async def _ended(self) -> CaptureError:
        """Tidy up after the process, which is made to end; returns what to say of it."""
        process, errors, writer = self._process, self._errors, self._writer
        if process is None or errors is None or writer is None:
            raise AssertionError("only a process that was started ends")
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, END_S)
        process.kill()
        code = await asyncio.to_thread(process.wait)
        writer.close()
        self._writer = self._process = None
        for number in tuple(self._answers):
            self._answered(number, None)
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace")[-_LAST_WORDS:].strip()
        errors.close()
        return CaptureError(f"the gateway's process {process.pid} ended with {code}{f': {said}' if said else ''}")

    def _send(self, order: Order) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line(order))


def refusal(store_url: str, *, spool: str) -> str:
    """Return the reason for which a gateway cannot have a process of its own, in words; ``""`` if it can."""
    if sys.platform == "win32":
        return "Windows does not pass a socket on to a process; start agl serve beside the experiment"
    if store_url.startswith("memory:"):
        return "the store is in the memory of this process; use sqlite:///runs.db"
    if spool == OFF:
        return 'only its spool keeps the calls that a process had when it was killed; take away spool = "off"'
    return ""
