"""A Ray cluster with VERL's trainer on it, as the experiment uses it: start, wait for a request, answer, stop.

All calls that start or stop Ray run in one thread of this object. Ray's processes are children of that thread and die
with it, so that neither an error nor `kill -9` of the experiment leaves any of them behind. If this process is already
connected to a cluster, as by the runner `ray`, VERL uses that connection and leaves it open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil

from agl.errors import AglError, ConfigError
from agl_algo_verl.privates import has_queue
from agl_algo_verl.ray.bridge import NAME, Bridge
from agl_algo_verl.ray.validation import checked, use_platform
from agl_algo_verl.runtime import check_version
from agl_algo_verl.typed import verl_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agl_algo_verl.ray.bridge import StepRequest, StepRows
    from agl_algo_verl.settings.ray import RaySettings

LOGICAL_CPUS = 16
"""Number of CPUs that a cluster on one machine without GPUs claims: its actors each request one, but mostly wait."""

STORE_MB = 256
"""Shared memory of a cluster on one machine without GPUs, in MiB."""


STARTS = 6
"""Number of attempts to start Ray, whose own limit of 30 seconds is too short on a busy machine."""

QUEUE_S, QUEUE_POLL_S = 60.0, 0.5
"""Seconds to wait until Ray has removed the queue of an earlier run, and seconds between two checks."""

_log = logging.getLogger(__name__)


class Cluster:
    """Runs VERL's trainer on Ray.

    Args:
        read: The configuration.
        environment: Environment variables for every process of the cluster.
    """

    def __init__(self, read: RaySettings, *, environment: Mapping[str, str]) -> None:
        self._read, self._environment = read, dict(environment)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agl-ray")
        self._bridge: Any = None
        self._runner: Any = None
        self._given: Any = None
        self._run: asyncio.Future[None] | None = None
        self._is_shared = False

    async def start(self, config: Callable[[], Any]) -> None:
        """Start Ray, or attach to it, and start VERL's trainer with the configuration that `config` returns.

        Raises ConfigError if Ray cannot start or the cluster has too few GPUs.
        """
        reference = await self._in_thread(lambda: self._launch(config))
        self._run = asyncio.wrap_future(reference.future())

    async def request(self) -> StepRequest | None:
        """Return VERL's next request, or None once its trainer has taken its last step.

        Raises AglError with the cause if VERL's trainer ends too early.
        """
        return await self._unless_trainer_ended(asyncio.wrap_future(self._bridge.request.remote().future()))

    async def ended(self) -> None:
        """Wait until VERL's trainer has ended, for whatever reason."""
        if self._run is not None:
            await asyncio.wait({self._run})

    def failure(self) -> AglError | None:
        """Return the error that ended VERL's trainer too early; None while it runs or after its last step."""
        run = self._run
        error = run.exception() if run is not None and run.done() else None
        return None if error is None else _trainer_error(error)

    async def answer(self, answer: StepRows) -> None:
        """Send the rows of a step to VERL's trainer; raises AglError if the trainer has ended."""
        ray: Any = verl_part("importlib:import_module")("ray")
        self._given = await self._in_thread(lambda: ray.put(answer))  # kept: Ray drops what nobody refers to
        await self._unless_trainer_ended(asyncio.wrap_future(self._bridge.answer.remote([self._given]).future()))

    async def save(self) -> None:
        """Make VERL's trainer, which waits for rows, save a checkpoint; raises AglError if the trainer has ended."""
        await self._unless_trainer_ended(asyncio.wrap_future(self._bridge.save.remote().future()))

    async def stop(self) -> None:
        """End VERL's trainer, and Ray if it was started here; call this once, even after `start` failed."""
        run, self._run = self._run, None
        await self._in_thread(self._shut_down)
        if run is not None:
            run.cancel()
            with contextlib.suppress(BaseException):
                await run
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _unless_trainer_ended(self, wanted: asyncio.Future[Any]) -> Any:
        """Return the result of `wanted`; None if VERL's trainer ends first.

        Raises AglError if `wanted` or the trainer fails.
        """
        run = self._run
        if run is None:
            raise AglError("VERL's trainer is not running; this is a defect of agl-algo-verl")
        try:
            await asyncio.wait({wanted, run}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_asked = wanted.done()
            wanted.cancel()  # otherwise it would wait on when this call is cancelled
        error = wanted.exception() if is_asked else run.exception()
        if error is not None:
            raise _trainer_error(error) from error
        return wanted.result() if is_asked else None

    def _launch(self, config: Callable[[], Any]) -> Any:
        check_version()
        ray: Any = verl_part("importlib:import_module")("ray")
        self._is_shared = ray.is_initialized()
        use_platform(self._environment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # VERL warns of every engine that is not installed
            composed = checked(config(), self._read)
            runner = verl_part("verl.trainer.main_ppo:TaskRunnerV1")
            own = verl_part("verl.trainer.constants_ppo:get_ppo_ray_runtime_env")(composed)
        own["env_vars"] = {**own.get("env_vars", {}), **self._environment, "TRANSFER_QUEUE_ENABLE": "1"}
        own = self._with_given(own)
        if self._is_shared:
            self._check_shared(ray)
        else:
            self._init(ray, own)
        self._check_resources(ray)
        check_alone(ray)
        self._bridge = ray.remote(Bridge).options(name=NAME, num_cpus=0, max_concurrency=8).remote()
        self._runner = runner.options(runtime_env=own).remote() if self._is_shared else runner.remote()
        return self._runner.run.remote(composed)

    def _with_given(self, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
        mine = self._read.ray_init.get("runtime_env", {})
        return {**runtime_env, **mine, "env_vars": {**runtime_env["env_vars"], **mine.get("env_vars", {})}}

    def _check_shared(self, ray: Any) -> None:
        """Raise ConfigError for `ray_init` arguments without effect on an already connected cluster."""
        given = {name: value for name, value in self._read.ray_init.items() if name != "runtime_env"}
        found = str(ray.get_runtime_context().gcs_address)
        if given.get("address") in ("auto", found):
            del given["address"]
        if given:
            raise ConfigError(
                f"ray_kwargs.ray_init = {given} has no effect, because the runner connects this process to the Ray "
                f"cluster at {found!r}. Remove it; where the runner starts the cluster, its size is that of "
                "[runner.params] cluster = { num_cpus = ..., num_gpus = ... }"
            )

    def _init(self, ray: Any, runtime_env: dict[str, Any]) -> None:
        given = {name: value for name, value in self._read.ray_init.items() if name != "runtime_env"}
        defaults: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not given.get("address"):
            defaults["include_dashboard"] = False
            defaults |= _one_machine(self._read.ranks) if self._read.is_cpu else {}
        arguments = {**defaults, **given, "runtime_env": runtime_env}
        before = set(psutil.Process().children())
        for attempt in range(1, STARTS + 1):
            try:
                ray.init(**arguments)
                return
            except Exception as error:
                ray.shutdown()
                _kill(set(psutil.Process().children()) - before)  # Ray forgets those of a start that failed
                if attempt < STARTS and "timed out during startup" in str(error):
                    _log.warning("Ray's processes did not start in time; starting them again (%d)", attempt)
                    continue
                raise ConfigError(
                    f"Ray cannot start with ray_kwargs.ray_init = {self._read.ray_init}: {_last_line(error)} "
                    "Without an address it starts a cluster here; with one, a cluster must listen there: ray status."
                ) from error

    def _check_resources(self, ray: Any) -> None:
        found = int(ray.cluster_resources().get("GPU", 0))
        if found < self._read.ranks:
            raise ConfigError(
                f"trainer.nnodes x trainer.n_gpus_per_node is {self._read.ranks}, and the Ray cluster has {found} "
                "GPUs. Lower them, or start Ray where the GPUs are (ray start --num-gpus)."
            )

    def _shut_down(self) -> None:
        ray: Any = verl_part("importlib:import_module")("ray")
        for actor in (self._runner, self._bridge):
            if actor is not None:
                with contextlib.suppress(Exception):  # it may be gone already
                    ray.kill(actor)
        self._runner = self._bridge = None
        if not self._is_shared:
            ray.shutdown()


def check_alone(ray: Any, *, patience_s: float = QUEUE_S) -> None:
    """Wait until VERL's queue of an earlier run is gone; raises ConfigError if another run still has one there.

    Two runs would put their rows into the same queue. Blocks.
    """
    until = time.monotonic() + patience_s
    while has_queue(ray):
        if time.monotonic() > until:
            raise ConfigError(
                f"Another run trains with VERL on the Ray cluster at {ray.get_runtime_context().gcs_address}, which "
                "serves one at a time: VERL's queue has one name. Wait for its end, stop it (ray list actors), or let "
                "this run start a cluster of its own, without an address."
            )
        time.sleep(QUEUE_POLL_S)  # Ray tells nobody but an actor's owner of its end


def _kill(processes: set[psutil.Process]) -> None:
    """Kill the given processes, which this process has started."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes), timeout=10)


def _one_machine(ranks: int) -> dict[str, Any]:
    """Return the arguments for a cluster on one machine without GPUs.

    It is always a new cluster: without ``local``, Ray would attach to another cluster of this machine, or to one that
    has ended and left its address behind. Its memory monitor is off, because it would kill workers for memory that
    other programs use.
    """
    return {
        "address": "local",
        "num_cpus": LOGICAL_CPUS + 4 * ranks,
        "num_gpus": ranks,
        "object_store_memory": STORE_MB * 2**20,
        "_system_config": {"memory_monitor_refresh_ms": 0, "prestart_worker_first_driver": False, "worker_niceness": 0},
    }


def _trainer_error(error: BaseException) -> AglError:
    return AglError(
        f"VERL's trainer on Ray ended with an error: {_last_line(error)} Every saved step is kept. Mend the "
        "cause unless it was an accident, and continue with --resume (resume=True)"
    )


def _last_line(error: BaseException) -> str:
    """Return the type and the last line of an error from another process; that line names the cause."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
