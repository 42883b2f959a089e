"""The program that the relay's process runs; `agl_algo_verl.serving.relay_process` sends it orders."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Literal

from agl.contracts import POLICY_KEY_ENV
from agl.errors import PolicyError
from agl.owned_process import Message, Owner, run_owned
from agl_algo_verl.serving.relay import Backend, ReplicaRelay

if TYPE_CHECKING:
    import socket


class Order(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A message to the relay's process: `use` other servers, `hold` calls, `count`, the server at `home`, or `stop`.

    Attributes:
        use: Number of an order of the kind `use`; a `lost` message refers to it.
        backend: With `use`, the servers (None for the `home` policy); with `home`, the answer to the question.
        is_held: True if calls are held after `use`.
        question: Number of the question that `home` answers.
        error: The reason why the `home` policy does not serve.
    """

    kind: Literal["use", "hold", "count", "home", "stop"]
    use: int = 0
    backend: Backend | None = None
    is_held: bool = False
    question: int = 0
    error: str = ""


class Note(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A message from the relay's process: an order is `done`, a question for `home`, or all replicas are `lost`.

    Attributes:
        calls: The number of answers of each replica since the process began, by URL.
        failures: The number of times that each replica could not be reached since then, by URL.
        question: Number of the question for the server at `home`.
        use: Number of the `use` order whose servers are lost.
    """

    kind: Literal["done", "home", "lost"]
    calls: dict[str, int] = {}
    failures: dict[str, int] = {}
    question: int = 0
    use: int = 0


class RelayProgram:
    """Runs a relay according to its owner's orders."""

    def __init__(self, owner: Owner[Order, Note]) -> None:
        self._owner = owner
        self._relay = ReplicaRelay(self._home, key=os.environ[POLICY_KEY_ENV])
        self._asked: dict[int, asyncio.Future[Backend]] = {}
        self._questions = itertools.count(1)
        self._stopped = asyncio.Event()
        self._newest = 0  # number of the newest order to use servers

    async def run(self, listener: socket.socket) -> None:
        """Relay calls until the owner sends `stop`."""
        await self._relay.start(listener)
        self._owner.begin(self._read())
        await self._stopped.wait()

    async def _read(self) -> None:
        async for order in self._owner.orders():
            match order.kind:
                case "use":  # not in a task of its own, because orders to use servers count in their order
                    self._use(order)
                case "home":
                    self._take(order)
                case _:
                    self._owner.begin(self._follow(order))

    async def _follow(self, order: Order) -> None:
        if order.kind == "hold":
            await self._relay.gate.pause()
        elif order.kind == "stop":
            await self._relay.stop()
            self._stopped.set()
        self._done(order)

    def _use(self, order: Order) -> None:
        self._relay.use(order.backend)
        if order.is_held:
            self._relay.gate.close()
        elif not self._relay.lost.is_set():
            self._owner.begin(self._tell_loss(order.use))
        self._done(order)

    def _take(self, order: Order) -> None:
        """Give the answer to a question for `home` to the call that waits for it."""
        asked = self._asked.pop(order.question, None)
        if asked is None or asked.done():
            return
        if order.backend is None:
            asked.set_exception(PolicyError(order.error))
        else:
            asked.set_result(order.backend)

    async def _home(self) -> Backend:
        question, asked = next(self._questions), asyncio.get_running_loop().create_future()
        self._asked[question] = asked
        self._owner.say(Note(kind="home", question=question))
        return await asked

    async def _tell_loss(self, use: int) -> None:
        """Report once the replicas of the order `use` are lost, unless a newer order has replaced them by then."""
        self._newest = use
        await self._relay.lost.wait()
        if self._newest == use:
            self._owner.say(Note(kind="lost", use=use))

    def _done(self, order: Order) -> None:
        calls, failures = dict(self._relay.calls), dict(self._relay.balance.load.failures)
        self._owner.say(Note(kind="done", number=order.number, calls=calls, failures=failures))


async def main(listener: socket.socket, owner: Owner[Order, Note]) -> None:
    """Relay calls that arrive at a listening socket, according to the owner's orders."""
    await RelayProgram(owner).run(listener)


if __name__ == "__main__":
    run_owned(main, order=Order)
