"""A relay in a process of its own: `python -m agl_algo_verl.serving.relay_program LISTENER CONTROL OWNER`.

LISTENER is a socket that listens already and stays the owner's, so that its address outlives this process. CONTROL is
one end of a socket pair over which the owner gives orders (`relay_lines.py`), OWNER the owner's process id. The program
ends when it is told to, and at once when its owner is gone, after `kill -9` as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from agl.contracts import POLICY_KEY_ENV
from agl.errors import PolicyError
from agl_algo_verl.serving.relay import Backend, ReplicaRelay
from agl_algo_verl.serving.relay_lines import LONGEST, Note, Order, line

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

OWNER_S = 1.0
"""Seconds between looks at the owner, whose forked children may hold CONTROL open when it is gone."""


class RelayProgram:
    """Runs a relay as its owner orders.

    Args:
        reader: Where orders arrive.
        writer: Where notes go.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._relay = ReplicaRelay(self._home, key=os.environ[POLICY_KEY_ENV])
        self._asked: dict[int, asyncio.Future[Backend]] = {}
        self._numbers = itertools.count(1)
        self._jobs = set[asyncio.Task[None]]()
        self._stopped = asyncio.Event()
        self._newest = 0  # number of the newest order to use servers

    async def run(self, listener: socket.socket) -> None:
        """Answer calls until the owner says stop; ends the process at once when the owner is gone."""
        await self._relay.start(listener)
        self._say(Note(kind="ready"))
        self._begin(self._read())
        await self._stopped.wait()

    async def _read(self) -> None:
        while text := await self._reader.readline():
            self._follow(msgspec.json.decode(text, type=Order))
        os._exit(0)

    def _follow(self, order: Order) -> None:
        match order.kind:
            case "use":
                self._relay.use(order.backend)
                if order.is_held:
                    self._relay.close_gate()
                elif not self._relay.lost.is_set():
                    self._begin(self._tell_loss(order.number))
            case "hold":
                self._begin(self._hold(order.number))
            case "home":
                self._take(order)
            case "stop":
                self._begin(self._stop())
            case _:
                self._say(self._counted(order.number))

    def _take(self, order: Order) -> None:
        """Give the server at home to the call that asked for it."""
        asked = self._asked.pop(order.number, None)
        if asked is None or asked.done():
            return
        if order.backend is None:
            asked.set_exception(PolicyError(order.error))
        else:
            asked.set_result(order.backend)

    async def _home(self) -> Backend:
        number, asked = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self._say(Note(kind="home", number=number))
        return await asked

    async def _hold(self, number: int) -> None:
        await self._relay.hold()
        self._say(self._counted(number))

    async def _stop(self) -> None:
        await self._relay.stop()
        self._stopped.set()

    async def _tell_loss(self, number: int) -> None:
        """Say that the replicas of an order are gone, where others have not taken their place by then."""
        self._newest = number
        await self._relay.lost.wait()
        if self._newest == number:
            self._say(Note(kind="lost", number=number))

    def _counted(self, number: int) -> Note:
        return Note(kind="done", number=number, calls=dict(self._relay.calls), failures=dict(self._relay.failures))

    def _say(self, note: Note) -> None:
        with contextlib.suppress(ConnectionError):  # the owner is gone; `run` finds that out
            self._writer.write(line(note))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)


async def watch(owner: int) -> None:
    """End this process once it is no child of its owner any more."""
    while os.getppid() == owner:
        await asyncio.sleep(OWNER_S)
    os._exit(0)


async def main(listener: int, control: int, owner: int) -> None:
    """Relay calls that arrive at the file descriptor `listener`, as orders over `control` say."""
    watching = asyncio.create_task(watch(owner))
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=control), limit=LONGEST)
    await RelayProgram(reader, writer).run(socket.socket(fileno=listener))
    watching.cancel()
    writer.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what a Ctrl-C means
    asyncio.run(main(*map(int, sys.argv[1:4])))
