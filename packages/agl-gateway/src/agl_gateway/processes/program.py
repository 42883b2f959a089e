"""The program of a gateway in a process of its own: ``python -m agl_gateway.processes.program LISTENER CONTROL OWNER``.

LISTENER is a socket that listens already and stays the owner's, so that its address outlives this process. CONTROL is
one end of a socket pair over which the owner gives orders (:mod:`agl_gateway.processes.gateway_process`), OWNER the
owner's process id. The program ends at the owner's order, and at once when its owner is gone, after ``kill -9`` too.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from agl import PluginManager
from agl.errors import AglError
from agl_gateway.access.certificate import certificate_of
from agl_gateway.processes.gateway_process import LONGEST, Beginning, GateState, Note, Order, line
from agl_gateway.record.spool_file import left_text, spools_for
from agl_gateway.service import GatewayService
from agl_gateway.store_api.contract import Fault, fault_of
from agl_inspect.stores import build_store
from agl_run import settle_heap
from agl_run.access import AttemptTokens

_log = logging.getLogger(__name__)

OWNER_S = 1.0
"""Seconds between looks at the owner, whose forked children may hold CONTROL open when it is gone."""


class _Lines(logging.Handler):
    """Sends log records to the owner, who logs them as its own. Created in the event loop that ``say`` belongs to."""

    def __init__(self, say: Callable[[Note], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        note = Note(kind="log", text=self.format(record), logger=record.name, level=record.levelno)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._say, note)


class _Program:
    """Runs a gateway as its owner orders."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: socket.socket) -> None:
        self._reader, self._writer, self._listener = reader, writer, listener
        self._keys = b""
        self._service: GatewayService | None = None
        self._jobs = set[asyncio.Task[None]]()
        self._has_begun = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Serve until the owner says stop; ends the process at once when the owner is gone."""
        logging.getLogger().addHandler(_Lines(self._say))
        self._begin(self._read())
        await self._stopped.wait()
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def _read(self) -> None:
        while text := await self._reader.readline():
            self._begin(self._follow(msgspec.json.decode(text, type=Order)))
        os._exit(0)

    async def _follow(self, order: Order) -> None:
        """Carry an order out, and say that it is done, or why it could not be."""
        text, fault = "", None
        try:
            text = await self._carry_out(order)
        except AglError as error:
            fault = fault_of(error)
        except Exception as error:  # noqa: BLE001 - isolation point: the owner decides what it means
            _log.exception("the gateway's process could not carry out the order %s", order.kind)
            fault = Fault(type=type(error).__name__, message=f"{type(error).__name__}: {error}")
        self._say(Note(kind="done", number=order.number, text=text, fault=fault))
        if order.kind == "stop":
            self._stopped.set()

    async def _carry_out(self, order: Order) -> str:
        if order.beginning is not None:
            try:
                return await self._serve(order.beginning)
            finally:
                self._has_begun.set()
        if order.kind == "beat":
            self._keys = order.keys or self._keys
            return ""
        await self._has_begun.wait()
        if order.kind == "stop":
            return await self._stop()
        if self._service is not None:
            await _follow(self._service, order)
        return ""

    async def _serve(self, given: Beginning) -> str:
        """Open the store and its spools, and listen; returns the URL."""
        self._keys = given.keys
        manager = PluginManager.from_environment(environ={**os.environ, **given.plugins})
        store = build_store(manager, given.store_url)
        self._service = service = GatewayService(
            store=store,
            upstreams=given.upstreams,
            tokens=AttemptTokens(lambda: self._keys),
            settings=given.settings,
            certificate=certificate_of(given.settings),
            spools=await spools_for(store, given.settings.spool, shown=repr(store)),
            listener=self._listener,
        )
        for name, gate in given.gates.items():
            await _set_gate(service, name, gate)
        url = await service.start()
        settle_heap()
        return url

    async def _stop(self) -> str:
        """Write what is recorded, and close; returns what to say of calls that the store did not take."""
        service, self._service = self._service, None
        if service is None:
            return ""
        left = await service.stop()
        await service.store.close()
        return left_text(left, service.spool_path) if left else ""

    def _say(self, note: Note) -> None:
        with contextlib.suppress(ConnectionError):  # the owner is gone; `_read` finds that out
            self._writer.write(line(note))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)


async def _follow(service: GatewayService, order: Order) -> None:
    """Settle an attempt, or pause or resume a policy."""
    if order.kind == "settle":
        await service.recorder.settle(order.name)
    elif order.kind == "pause":
        await service.router.gates[order.name].pause(drain_s=order.drain_s)
    elif order.gate is not None:
        service.router.gates[order.name].resume(model_version=order.gate.model_version, model=order.gate.model)


async def _set_gate(service: GatewayService, name: str, state: GateState) -> None:
    gate = service.router.gates[name]
    gate.resume(model_version=state.model_version, model=state.model)
    if state.is_paused:
        await gate.pause(drain_s=0.0)


def watch(owner: int) -> None:
    """End this process once it is no child of its owner any more, even if its event loop hangs."""
    while os.getppid() == owner:
        time.sleep(OWNER_S)
    os._exit(0)


async def main(listener: int, control: int, owner: int) -> None:
    """Serve at the file descriptor ``listener``, as orders over ``control`` say."""
    threading.Thread(target=watch, args=(owner,), daemon=True).start()
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=control), limit=LONGEST)
    await _Program(reader, writer, socket.socket(fileno=listener)).run()
    writer.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what a Ctrl-C means
    asyncio.run(main(*map(int, sys.argv[1:4])))
