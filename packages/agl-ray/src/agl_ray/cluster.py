"""The connection to a Ray cluster: attaches to one, or starts one on this machine that ends with the run.

All calls that wait for Ray run in one thread of this object's own. A cluster that is started here consists of children
of that thread and dies with it, so that neither an error nor `kill -9` of the experiment leaves a process behind.
Ray's usage statistics and dashboard are off.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from agl.errors import AglError, ConfigError
from agl.schemas import Json, new_span_id

T = TypeVar("T")

STARTS = 6
"""Attempts to start Ray, which gives its own processes 30 seconds: too few on a busy machine."""

STORE_BYTES = 128 << 20
"""Shared memory of a cluster that is started here, which carries no data."""

_OWN_CLUSTER: Mapping[str, Any] = {
    "object_store_memory": STORE_BYTES,
    "_system_config": {"prestart_worker_first_driver": False, "memory_monitor_refresh_ms": 0},
}
"""Arguments for a cluster that is started here.

Its memory monitor is off, for it would kill workers for memory that other programs use.
"""

_LOG = logging.getLogger("agl_ray")


def ray() -> Any:
    """Return the module, which is imported when a cluster is needed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return import_module("ray")


class Cluster:
    """One connection of this process to a Ray cluster.

    Args:
        address: ``auto``, ``local`` or ``HOST:PORT``.
        started: Arguments of :func:`ray.init` for a cluster that is started here.
    """

    def __init__(self, address: str, *, started: Mapping[str, Json]) -> None:
        self._address = address
        self._started = dict(started)
        self._thread: ThreadPoolExecutor | None = None
        self._is_ours = False
        self.is_new = False

    async def connect(self) -> None:
        """Attach or start; where this process is connected already, such as for VERL, use that.

        Raises:
            ConfigError: There is no such cluster, or none can be started.
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
                return

    async def run(self, work: Callable[[], T]) -> T:
        """Run what waits for Ray, in this object's thread."""
        if self._thread is None:
            raise AglError("there is no connection to Ray; this is a defect of agl-ray")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def disconnect(self) -> None:
        """Leave the cluster; one that was started here ends. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._is_ours:
            await asyncio.get_running_loop().run_in_executor(thread, ray().shutdown)
        self._is_ours = self.is_new = False
        thread.shutdown(wait=False)

    def machines(self) -> list[dict[str, float]]:
        """Return what each machine of the cluster has."""
        return [dict(node["Resources"]) for node in ray().nodes() if node["Alive"]]

    def hosts(self) -> set[str]:
        """Return the addresses of the machines."""
        return {str(node["NodeManagerAddress"]) for node in ray().nodes() if node["Alive"]}

    def _connect(self) -> None:
        if ray().is_initialized():
            return
        for address in _addresses(self._address):
            try:
                self._init(address)
            except _NoneThereError as error:
                if self._address == "auto":
                    continue  # of a cluster that has ended
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


class _TooSlowError(Exception):
    """Ray's processes did not start in the time that Ray gives them."""


class _NoneThereError(Exception):
    """No cluster answers at an address."""


def _addresses(wanted: str) -> Sequence[str]:
    """Return the addresses to try in turn; ``auto`` is what Ray itself would find, or else a new cluster here."""
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
    """Return true if an address leads to a cluster that someone started, as far as is known without asking it."""
    return ray().is_initialized() or _addresses(wanted)[0] != "local"


def this_machine(started: Mapping[str, Json]) -> dict[str, float]:
    """Return what a cluster has that would be started here."""
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
    """Return the last line of an error from another process, which names its cause, as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


async def answer_of(reference: Any) -> Any:
    """Wait for an actor's answer; what it raised is raised here.

    Raises:
        AglError: The actor's process is gone, or raised something that cannot be sent.
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
        raise ProcessGoneError(f"a process on the Ray cluster is gone: {last_line(error)}") from error


class ProcessGoneError(AglError):
    """An actor's process ended, and Ray did not start it again."""
