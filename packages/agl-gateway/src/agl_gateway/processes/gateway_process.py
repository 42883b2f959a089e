"""Runs a gateway in its own process for an experiment.

Every call that the process acknowledged is in the store or in its spool. If the process has to be restarted, the new
one takes over the spool.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from agl.contracts import Store, Upstream
from agl.errors import CaptureError, ConfigError
from agl.owned_process import HEALTH_S, Message, OwnedProcess
from agl_gateway.processes.loop_thread import LoopThread
from agl_gateway.processes.supervisor import listening
from agl_gateway.record.spool_file import OFF
from agl_gateway.relay.routing import Router
from agl_gateway.service import BACKLOG, bind_error
from agl_gateway.settings import Settings
from agl_gateway.store_api.contract import Fault, error_of
from agl_gateway.traffic.arms import with_distinct_names
from agl_run.access import Secret


class GateState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one policy's calls: whether they are held, and their model version and model name.

    ``""`` keeps the version or name that the upstream had at the start.
    """

    is_paused: bool = False
    model_version: str = ""
    model: str = ""


class Beginning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The data that a gateway process needs to start serving.

    Attributes:
        plugins: Environment variables that make the process load the same plugins.
        keys: Signing keys of attempt tokens, one per line.
        gates: State of each policy, so that a restarted process continues with it.
    """

    store_url: str
    settings: Settings
    keys: bytes
    upstreams: tuple[Upstream, ...]
    plugins: dict[str, str] = {}
    gates: dict[str, GateState] = {}


class Order(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A message to the gateway's process from the process that started it.

    The kinds are ``begin``, ``pause`` or ``resume`` a policy, ``settle`` an attempt, ``beat`` and ``stop``.

    Attributes:
        name: The policy, or the attempt's id.
        drain_s: Seconds for which a pause waits for calls in flight.
        gate: The version and model of calls after ``resume``.
        keys: Signing keys of attempt tokens, sent with ``beat``.
    """

    kind: Literal["begin", "pause", "resume", "settle", "beat", "stop"]
    beginning: Beginning | None = None
    name: str = ""
    drain_s: float = 0.0
    gate: GateState | None = None
    keys: bytes = b""


class Note(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A message from the gateway's process: an order is ``done``, or a line for the ``log``.

    Attributes:
        text: The URL after ``begin``, a final warning (or ``""``) after ``stop``, or the line to log.
        fault: The error because of which the order could not be carried out.
        logger: Name of the logger for the line.
        level: Number of the log level of the line.
    """

    kind: Literal["done", "log"]
    text: str = ""
    fault: Fault | None = None
    logger: str = ""
    level: int = 0


PROGRAM = (sys.executable, "-m", "agl_gateway.processes.program")
"""The command that starts the gateway's process, without arguments."""

STOP_S = 60.0
"""Seconds that the gateway's process has after ``stop`` to write its records and exit."""

PATIENCE_S = 120.0
"""Seconds for which :meth:`GatewayProcess.settle` waits while the gateway's process is restarted."""

_ASK_AGAIN_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class GatewayProcess:
    """Implements :class:`agl.contracts.Gateway` with a separate process. May be called from any event loop.

    Attributes:
        store_url: The store, which the process opens by itself.
        settings: The gateway's settings, with a folder for its spool.
        plugins: Environment variables that make the process load the same plugins.
        program: The command that starts the process.
        health_s: See :class:`agl.owned_process.OwnedProcess`.
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
        self._process = OwnedProcess[Order, Note](
            self.program,
            name="the gateway's process",
            note=Note,
            error=CaptureError,
            begin=self._first_order,
            beat=lambda: Order(kind="beat", keys=self._keys()),
            take=_take,
            health_s=self.health_s,
        )

    @property
    def pid(self) -> int:
        """The process id; 0 while no process runs."""
        return self._process.pid

    @property
    def restarts(self) -> int:
        """The number of times that the process was restarted."""
        return self._process.restarts

    async def start(self, *, store: Store, upstreams: Sequence[Upstream], secret: Secret) -> str:
        """Start the process and wait until it listens; returns the base URL without ``/v1``.

        The process opens the store by its URL; the argument ``store`` is not used.

        Raises:
            ConfigError: The address is taken, an upstream cannot be served, or the process cannot use a setting.
        """
        del store
        if self._thread.is_running:
            raise CaptureError("this gateway is already running; stop it first, or create another one")
        names = Router(with_distinct_names(upstreams)).targets
        self._gates = {name: GateState() for name in names}
        self._secret = secret
        self._upstreams = tuple(upstreams)
        self._thread.start()
        try:
            return await self._thread.run(self._start)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Let the process write all remaining records, then end it; idempotent."""
        if not self._thread.is_running:
            return
        try:
            await self._thread.run(self._stop)
        finally:
            await self._thread.stop()

    async def pause(self, policy: str, *, drain_s: float = 30.0) -> None:
        """Hold new calls of ``policy`` and wait up to ``drain_s`` seconds until the calls in flight have ended."""
        self._set_gate(policy, is_paused=True)
        # If the process ends, no call is left in flight, and the next process begins with the policy paused.
        await self._tell(Order(kind="pause", name=policy, drain_s=drain_s))

    async def resume(self, policy: str, *, model_version: str = "", model: str = "") -> None:
        """Release the held calls; later calls carry ``model_version`` and request ``model``."""
        gate = self._set_gate(policy, is_paused=False, model_version=model_version, model=model)
        await self._tell(Order(kind="resume", name=policy, gate=gate))

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store, even if the process has to be restarted.

        Raises:
            CaptureError: The store refused some of the calls, or no process serves again in time.
        """
        self._require_running()
        await self._thread.run(lambda: self._settle(attempt_id))

    async def _start(self) -> str:
        where = self.settings.host, self.settings.port
        try:
            listener = listening(*where, backlog=BACKLOG)
        except OSError as error:
            raise bind_error(*where, error) from error
        return (await self._process.start(listener)).text

    async def _stop(self) -> None:
        note = await self._process.stop(Order(kind="stop"), within_s=STOP_S)
        if note is not None and note.text:
            _log.warning("%s", note.text)

    def _require_running(self) -> None:
        if not self._thread.is_running:
            raise CaptureError("the gateway is not running; start it first")

    def _set_gate(self, policy: str, *, is_paused: bool, model_version: str = "", model: str = "") -> GateState:
        """Record whether a policy is paused, with its version and model, for a restarted process."""
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
        """Send an order to the process; returns when the order is done or the process has ended."""
        await self._thread.run(lambda: self._process.ask(order))

    async def _settle(self, attempt_id: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if await self._process.ask(Order(kind="settle", name=attempt_id)) is not None:
                return
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"the gateway's process, which may hold calls of attempt {attempt_id!r}, does not come back: "
                    f"{self._process.last_words}"
                )
            await asyncio.sleep(_ASK_AGAIN_S)

    def _first_order(self) -> Order:
        beginning = Beginning(
            store_url=self.store_url,
            settings=self.settings,
            keys=self._keys(),
            upstreams=self._upstreams,
            plugins=dict(self.plugins or {}),
            gates=dict(self._gates),
        )
        return Order(kind="begin", beginning=beginning)

    def _keys(self) -> bytes:
        return self._secret if isinstance(self._secret, bytes) else self._secret()


def _take(note: Note) -> None:
    """Log the line of a ``log`` note; raise the error that a note carries."""
    if note.kind == "log":
        logging.getLogger(note.logger).log(note.level, "%s", note.text)
    if note.fault is not None:
        raise error_of(note.fault)


def refusal(store_url: str, *, spool: str) -> str:
    """Return why a gateway with this store and spool cannot run in a separate process; ``""`` if it can."""
    if sys.platform == "win32":
        return "Windows does not pass a socket on to a process; start agl serve in addition to the experiment"
    if store_url.startswith("memory:"):
        return "the store is in the memory of this process; use sqlite:///runs.db"
    if spool == OFF:
        return 'only its spool keeps the calls that a process had when it was killed; take away spool = "off"'
    return ""
