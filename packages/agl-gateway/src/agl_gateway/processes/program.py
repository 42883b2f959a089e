"""The program that a gateway's separate process runs; :mod:`agl_gateway.processes.gateway_process` sends it orders."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from agl import PluginManager
from agl.errors import AglError
from agl.owned_process import Owner, run_owned
from agl_gateway.access.certificate import certificate_of
from agl_gateway.processes.gateway_process import Beginning, GateState, Note, Order
from agl_gateway.record.redaction import redaction_of
from agl_gateway.record.spool_file import left_text, spools_for
from agl_gateway.service import GatewayService
from agl_gateway.store_api.contract import Fault, fault_of
from agl_inspect.stores import build_store
from agl_run import settle_heap
from agl_run.access import AttemptTokens

_log = logging.getLogger(__name__)


class _Lines(logging.Handler):
    """A log handler that sends the records to the owning process, which logs them.

    Create it in the event loop in which ``say`` must be called.
    """

    def __init__(self, say: Callable[[Note], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        note = Note(kind="log", text=self.format(record), logger=record.name, level=record.levelno)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._say, note)


class _Program:
    """Runs a gateway according to its owner's orders."""

    def __init__(self, listener: socket.socket, owner: Owner[Order, Note]) -> None:
        self._listener, self._owner = listener, owner
        self._keys = b""
        self._service: GatewayService | None = None
        self._has_begun = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Serve until the owner sends ``stop``."""
        logging.getLogger().addHandler(_Lines(self._owner.say))
        self._owner.begin(self._read())
        await self._stopped.wait()

    async def _read(self) -> None:
        async for order in self._owner.orders():
            self._owner.begin(self._follow(order))

    async def _follow(self, order: Order) -> None:
        """Carry out an order, then report to the owner that it is done, or the error that prevented it."""
        text, fault = "", None
        try:
            text = await self._carry_out(order)
        except AglError as error:
            fault = fault_of(error)
        except Exception as error:  # noqa: BLE001 - isolation point: the owner decides what it means
            _log.exception("the gateway's process could not carry out the order %s", order.kind)
            fault = Fault(type=type(error).__name__, message=f"{type(error).__name__}: {error}")
        self._owner.say(Note(kind="done", number=order.number, text=text, fault=fault))
        if order.kind == "stop":
            self._stopped.set()

    async def _carry_out(self, order: Order) -> str:
        if order.beginning is not None:
            try:
                return await self._serve(order.beginning)
            finally:
                self._has_begun.set()
        if order.kind == "beat":
            self._keys = order.keys
            return ""
        await self._has_begun.wait()
        if order.kind == "stop":
            return await self._stop()
        if self._service is not None:
            await _follow(self._service, order)
        return ""

    async def _serve(self, given: Beginning) -> str:
        """Open the store and the spools, and start to listen; returns the gateway's URL."""
        self._keys = given.keys
        manager = PluginManager.from_environment(environ={**os.environ, **given.plugins})
        store = build_store(manager, given.store_url)
        self._service = service = GatewayService(
            store=store,
            upstreams=given.upstreams,
            tokens=AttemptTokens(lambda: self._keys),
            settings=given.settings,
            certificate=certificate_of(given.settings),
            redaction=redaction_of(given.settings.redact, manager),
            spools=await spools_for(store, given.settings.spool, shown=repr(store)),
            listener=self._listener,
        )
        for name, gate in given.gates.items():
            await _set_gate(service, name, gate)
        url = await service.start()
        settle_heap()
        return url

    async def _stop(self) -> str:
        """Write all remaining records, and close; returns a warning if calls stay in the spool, else ``""``."""
        service, self._service = self._service, None
        if service is None:
            return ""
        left = await service.stop()
        await service.store.close()
        return left_text(left, service.spool_path) if left else ""


async def _follow(service: GatewayService, order: Order) -> None:
    """Carry out a ``settle``, ``pause`` or ``resume`` order."""
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


async def main(listener: socket.socket, owner: Owner[Order, Note]) -> None:
    """Serve on a listening socket, according to the owner's orders."""
    await _Program(listener, owner).run()


if __name__ == "__main__":
    run_owned(main, order=Order)
