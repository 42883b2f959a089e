"""The connection to a Ray cluster: attaches to one, or starts one on this machine that ends with the run.

All calls that wait for Ray run in one thread of the connection. The processes of a cluster that is started here are
children of that thread and die with it, so that neither an error nor `kill -9` of the experiment leaves a process
behind. Ray's usage statistics and dashboard are off.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from agl.errors import AglError, ConfigError
from agl.schemas import Json, new_span_id

T = TypeVar("T")

STARTS = 6
"""Largest number of tries to start Ray, which gives its processes 30 seconds, too few on a busy machine."""

STORE_BYTES = 128 << 20
"""Shared memory of a cluster that is started here, in bytes; the cluster carries no data."""

KNOCK_S = 1.0
"""Seconds between two connection attempts to the head's port, and time limit of each attempt in seconds."""

REFUSALS = 2
"""After this many refused connections in a row, a head counts as ended: nothing listens at its port any more."""

HELD = 3
"""Number of connections kept open to the head's port; they are renewed, because Ray closes idle ones."""

SILENCE_S = 30.0
"""Seconds without an answer after which a head counts as gone; Ray itself ends a waiting process after 60."""

SHUTDOWN_S = 20.0
"""Time limit in seconds for leaving a cluster that is gone."""

_OWN_CLUSTER: Mapping[str, Any] = {
    "object_store_memory": STORE_BYTES,
    "_system_config": {"prestart_worker_first_driver": False, "memory_monitor_refresh_ms": 0},
}
"""Arguments for a cluster that is started here.

The cluster's memory monitor is off, because it would kill workers for memory that other programs use.
"""

_LOG = logging.getLogger("agl_ray")


def ray() -> Any:
    """Import Ray and return the module; this is done only once a cluster is needed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return import_module("ray")


class Cluster:
    """One connection of this process to a Ray cluster.

    Args:
        address: ``auto``, ``local`` or ``HOST:PORT``.
        started: Arguments of :func:`ray.init`, used only for a cluster that is started here.

    Attributes:
        is_new: True if this connection started the cluster.
    """

    def __init__(self, address: str, *, started: Mapping[str, Json]) -> None:
        self._address = address
        self._started = dict(started)
        self._thread: ThreadPoolExecutor | None = None
        self._is_ours = False
        self._head = ""
        self._gone: asyncio.Event = asyncio.Event()
        self._problem_of_head = ""
        self._watching: asyncio.Task[None] | None = None
        self.is_new = False

    async def connect(self) -> None:
        """Attach to the cluster or start one; an existing connection of this process, for example VERL's, is used.

        Raises:
            ConfigError: The cluster does not exist, or cannot be started.
        """
        for attempt in range(1, STARTS + 1):
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agl-ray")
            try:
                await self.run(self._connect)
            except _TooSlowError as error:
                self._thread.shutdown()  # with it end the processes of a start that failed, which Ray forgets
                if attempt == STARTS:
                    raise self._problem("local", error) from error
                _LOG.warning("Ray's processes did not start in time; starting them again (%d)", attempt)
            else:
                self._head = str(ray().get_runtime_context().gcs_address)
                self._watching = asyncio.create_task(self._watch())
                return

    async def run(self, work: Callable[[], T]) -> T:
        """Run a function that waits for Ray in this object's thread, and return its result.

        Raises:
            ClusterGoneError: The cluster is gone; Ray would not return from the call before it ends this process.
        """
        if self._thread is None:
            raise AglError("there is no connection to Ray; this is a defect of agl-ray")
        if self._gone.is_set():
            self._raise_gone()
        return await self.unless_gone(asyncio.get_running_loop().run_in_executor(self._thread, work))

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """Return the result of work on the cluster; raises :class:`ClusterGoneError` if the cluster is gone first."""
        working, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            self._raise_gone()
        finally:
            working.cancel()
            gone.cancel()

    async def until_gone(self) -> NoReturn:
        """Wait until the cluster is gone, and then raise :class:`ClusterGoneError`."""
        await self._gone.wait()
        self._raise_gone()

    async def _watch(self) -> None:
        self._problem_of_head = await until_gone(self._head)
        self._gone.set()

    def _raise_gone(self) -> NoReturn:
        raise ClusterGoneError(
            f"the Ray cluster at {self._head} is gone: {self._problem_of_head}. Every finished step is kept; start a "
            "cluster and continue with --resume (resume=True)"
        )

    async def disconnect(self) -> None:
        """Leave the cluster, which ends if it was started here. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        if self._is_ours and self._gone.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_S):
                    await asyncio.to_thread(ray().shutdown)  # Ray's own thread may be waiting for the lost head
        elif self._is_ours:
            await asyncio.get_running_loop().run_in_executor(thread, ray().shutdown)
        self._is_ours = self.is_new = False
        thread.shutdown(wait=False)

    async def machines(self) -> list[dict[str, float]]:
        """Return the resources of each machine of the cluster, such as ``CPU``."""
        return [dict(node["Resources"]) for node in await self._nodes()]

    async def hosts(self) -> set[str]:
        """Return the addresses of the machines."""
        return {str(node["NodeManagerAddress"]) for node in await self._nodes()}

    async def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in await self.run(ray().nodes) if node["Alive"]]

    def _connect(self) -> None:
        if ray().is_initialized():
            return
        for address in _addresses(self._address):
            try:
                self._init(address)
            except _NoneThereError as error:
                if self._address == "auto":
                    continue  # the address is of a cluster that has ended
                raise ConfigError(str(error)) from error.__cause__
            self._is_ours = True
            self.is_new = address == "local"
            return

    def _init(self, address: str) -> None:
        given: dict[str, Any] = {
            "address": address,
            "namespace": f"agl-{new_span_id()}",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        if address == "local":
            given |= {"include_dashboard": False, **_OWN_CLUSTER, **self._started}
        try:
            ray().init(**given)
        except Exception as error:
            with contextlib.suppress(Exception):
                ray().shutdown()
            if "timed out" in str(error) and address == "local":
                raise _TooSlowError(str(error)) from error
            raise self._problem(address, error) from error

    def _problem(self, address: str, error: Exception) -> Exception:
        if address == "local":
            return ConfigError(
                f"Ray cannot start on this machine with {self._started or 'its own settings'}: {last_line(error)} "
                'Change cluster in [runner.params], or name a cluster that runs: address = "HOST:PORT"'
            )
        return _NoneThereError(
            f"no Ray cluster answers at {address!r}: {last_line(error)} Check that it runs there (ray status), that "
            "this machine may reach its port, that both have the same releases of Ray and Python and, where "
            'it asks for a token, RAY_AUTH_MODE=token and the token; or use the address "auto" for this machine'
        )


async def until_gone(head: str, *, silence_s: float = SILENCE_S) -> str:
    """Connect to a head's port every second until the head is gone; return a description of what happened.

    Ray's own calls are no substitute: they wait for a head that is gone and then end the process without an error of
    the experiment, or at once if a new cluster has replaced the old one.

    Args:
        head: ``HOST:PORT``.
        silence_s: Seconds without an answer after which the head counts as gone.
    """
    refusals, answered_at = 0, time.monotonic()
    held: deque[_Held] = deque()
    try:
        while True:
            try:
                held.append(await _knock(head))
                refusals, answered_at = 0, time.monotonic()
            except ConnectionRefusedError:
                refusals += 1
            except (OSError, TimeoutError):
                refusals = 0
            if refusals >= REFUSALS or any(one.is_lost for one in held):
                return "its head has ended"
            if time.monotonic() - answered_at >= silence_s:
                return f"its head has not answered for {silence_s:g} s"
            if len(held) > HELD:
                held.popleft().close()
            await asyncio.sleep(KNOCK_S)
    finally:
        for one in held:
            one.close()


async def _knock(address: str) -> "_Held":
    """Open a connection to a port; raises if this takes longer than ``KNOCK_S``."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(KNOCK_S):
        _, held = await asyncio.get_running_loop().create_connection(_Held, host.strip("[]"), int(port))
    return held


class _Held(asyncio.Protocol):
    """A connection that shows the end of the listening process, even if another process takes its port at once."""

    def __init__(self) -> None:
        self.is_lost = False
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _TooSlowError(Exception):
    """Ray's processes did not start within Ray's own time limit."""


class _NoneThereError(Exception):
    """No cluster answers at the address."""


def _addresses(wanted: str) -> Sequence[str]:
    """Return the addresses to try in order; for ``auto`` those that Ray itself would find, then a new cluster here."""
    if wanted != "auto":
        return (wanted,)
    given = os.environ.get("RAY_ADDRESS", "")
    if given:
        return (given,)
    note = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    try:
        found = note.read_text(encoding="utf-8").strip()
    except OSError:
        found = ""
    return (found, "local") if found else ("local",)


def has_cluster(wanted: str) -> bool:
    """Return true if the address seems to belong to an existing cluster; does not contact the cluster."""
    return ray().is_initialized() or _addresses(wanted)[0] != "local"


def this_machine(started: Mapping[str, Json]) -> dict[str, float]:
    """Return the resources of a cluster that would be started on this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, float] = {"CPU": float(os.cpu_count() or 1), "GPU": float(_gpus()), "memory": float(memory)}
    for key, name in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory")):
        value = started.get(key)
        if isinstance(value, int | float):
            found[name] = float(value)
    resources = started.get("resources")
    if isinstance(resources, dict):
        custom = cast("dict[str, Json]", resources)
        found |= {name: float(amount) for name, amount in custom.items() if isinstance(amount, int | float)}
    return found


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def last_line(error: BaseException) -> str:
    """Return the last line of an error from another process, which gives the cause, as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


async def answer_of(reference: Any) -> Any:
    """Wait for an actor's answer and return it; an exception that the actor raised is raised here.

    Raises:
        ProcessGoneError: The actor's process is gone.
        AglError: The actor's answer or exception cannot be sent or read.
    """
    exceptions = ray().exceptions
    try:
        return await asyncio.wrap_future(reference.future())
    except exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception):
            raise cause from None
        raise AglError(f"a process on the Ray cluster failed: {last_line(error)}") from error
    except exceptions.RayError as error:
        if _came_unreadable(error):
            raise AglError(f"a process on the Ray cluster sent what cannot be read here: {last_line(error)}") from error
        raise ProcessGoneError(f"a process on the Ray cluster is gone: {last_line(error)}") from error


def _came_unreadable(error: Exception) -> bool:
    """Return true if an answer, or an error of the actor itself, arrived but could not be unpickled."""
    is_error = type(error).__name__ == "UnserializableException"  # a name that older releases lack
    return is_error or isinstance(getattr(error, "client_exc", None), Exception)


class ClusterGoneError(AglError):
    """The cluster's head ended or cannot be reached, and everything that Ray placed is lost."""


class ProcessGoneError(AglError):
    """An actor's process ended, and Ray did not start it again."""
