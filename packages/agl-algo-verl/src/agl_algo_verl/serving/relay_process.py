"""Runs the relay in a separate process."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from agl.contracts import POLICY_KEY_ENV
from agl.errors import PolicyError
from agl.owned_process import HEALTH_S, OwnedProcess
from agl_algo_verl.serving.relay import DRAIN_S
from agl_algo_verl.serving.relay_program import Note, Order

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from agl.errors import AglError
    from agl_algo_verl.serving.relay import Backend

PROGRAM = (sys.executable, "-m", "agl_algo_verl.serving.relay_program")
"""The command that starts the relay's process, without arguments."""

STOP_S = DRAIN_S + 10.0
"""Seconds that the relay's process has after `stop` to finish calls and exit."""


class RelayProcess:
    """Controls a `ReplicaRelay` in another process; all methods belong to one event loop.

    Args:
        home: Returns the server for calls while there are no replicas, and may start it.
        key: API key that calls must carry.
        program: The command that starts the process.
        health_s: See `agl.owned_process.OwnedProcess`.

    Attributes:
        lost: Set while no replica can be reached and calls wait for others, and after a `failure`.
        calls: The number of answers of each replica, by URL, at the last `count`.
        failures: The number of times that each replica could not be reached, by URL, at the last `count`.
        failure: The reason why the process is no longer restarted; None while it runs.
    """

    def __init__(
        self,
        home: Callable[[], Awaitable[Backend]],
        *,
        key: str,
        program: Sequence[str] = PROGRAM,
        health_s: float = HEALTH_S,
    ) -> None:
        self._home = home
        self._backend: Backend | None = None
        self._is_held = False
        self._uses = 0  # orders of this kind so far: the number of the newest, which news of lost replicas must have
        self._jobs = set[asyncio.Task[None]]()
        self._earlier = Counter[str](), Counter[str]()  # calls and failures of processes that have ended
        self._process = OwnedProcess[Order, Note](
            program,
            name="the process that passes calls on to VERL's replicas",
            note=Note,
            error=PolicyError,
            begin=self._first_order,
            beat=lambda: Order(kind="count"),
            take=self._take,
            environment={POLICY_KEY_ENV: key},
            health_s=health_s,
            give_up=self._give_up,
        )
        self.lost = asyncio.Event()
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.failure: AglError | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 while there is no process."""
        return self._process.pid

    @property
    def restarts(self) -> int:
        """The number of times that the process was restarted."""
        return self._process.restarts

    async def start(self, listener: socket.socket) -> None:
        """Start the process, which answers calls that arrive at the socket `listener`; `stop` closes it.

        Raises PolicyError with the process's last output if it does not start.
        """
        await self._process.start(listener)

    def use(self, backend: Backend | None) -> None:
        """Send calls to the servers `backend` from now on, or to `home` if None; see `ReplicaRelay.use`."""
        self._backend = backend
        if backend is not None and self.failure is None:
            self.lost.clear()
        self._is_held = self.lost.is_set()
        self._uses += 1
        self._process.send(self._state())

    async def hold(self) -> None:
        """Hold new calls until `use` or `stop`; returns once no call is in flight."""
        self._is_held = True
        # Without a process no call is in flight, and the next process begins with calls held.
        await self._process.ask(Order(kind="hold"))

    async def count(self) -> None:
        """Update `calls` and `failures` from the process."""
        await self._process.ask(Order(kind="count"))

    async def stop(self) -> None:
        """Stop listening, and wait for the calls in flight; held calls are refused. Idempotent."""
        await self._process.stop(Order(kind="stop"), within_s=STOP_S)
        for job in tuple(self._jobs):
            job.cancel()

    def _state(self) -> Order:
        return Order(kind="use", use=self._uses, backend=self._backend, is_held=self._is_held)

    def _first_order(self) -> Order:
        self._earlier = self.calls.copy(), self.failures.copy()
        return self._state()

    def _take(self, note: Note) -> None:
        if note.kind == "home":
            self._begin(self._answer_home(note.question))
        elif note.kind == "done":
            self.calls = self._earlier[0] + Counter(note.calls)
            self.failures = self._earlier[1] + Counter(note.failures)
        elif note.use == self._uses:
            self._is_held = True
            self.lost.set()

    async def _answer_home(self, question: int) -> None:
        try:
            self._process.send(Order(kind="home", question=question, backend=await self._home()))
        except Exception as error:  # noqa: BLE001 - isolation point: the agent learns why no model serves
            self._process.send(Order(kind="home", question=question, error=str(error)))

    def _give_up(self, error: AglError) -> None:
        self.failure = error
        self.lost.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
