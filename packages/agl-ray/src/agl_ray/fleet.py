"""The runner ``ray``: places workers and algorithms of an experiment on a Ray cluster.

Ray places processes and restarts them; rollouts are exchanged through the experiment's store, as with ``agl worker``.
Algorithms' shares are reserved first, so that no worker takes a GPU that an algorithm needs.
"""

from collections.abc import Mapping, Sequence

from agl.algorithms import AlgorithmConfig, PlacementConfig
from agl.contracts import Algorithm
from agl.errors import ConfigError
from agl.schemas import Json
from agl_ray.cluster import Cluster, has_cluster, this_machine
from agl_ray.layout import Room, Share, amounts_text, no_room, share_of, total
from agl_ray.placed import placed_algorithm
from agl_ray.pool import Pool, PoolSettings
from agl_ray.reservation import Patience, Reservation
from agl_run.fleets import LOOP_ROLLOUTS, FleetSetup

WORKER_CPUS = 0.5
"""Default CPUs of a worker, which mostly waits for models."""

ALGORITHM_CPUS = 1.0

IDLE_S = 45.0
"""Default of ``idle_s``: with two checks and the time to stop, a worker ends about a minute after its last attempt."""


class RayFleet:
    """Runs an experiment's attempts in workers on a Ray cluster.

    Args:
        placement: The cluster share of each worker.
        concurrency: Attempts at once in each worker, at most 256.
        address: ``auto``, ``local``, or ``HOST:PORT`` of a cluster's head. ``local`` starts a new cluster on this
            machine. ``auto`` uses the cluster that ``RAY_ADDRESS`` names or that runs on this machine, and otherwise
            starts a new one here.
        min_workers: Workers that are kept even without work.
        max_workers: The most workers.
        idle_s: Seconds without an attempt after which a worker is stopped; it has ten seconds to end.
        wait_s: Seconds within which all reservations and the first worker together must find room.
        runner: The runner with which each worker runs attempts, such as ``process``.
        runner_params: Arguments of ``runner``.
        cluster: Arguments of ``ray.init`` for a cluster that is started here, such as ``{ num_cpus = 8 }``.
    """

    def __init__(
        self,
        *,
        placement: PlacementConfig | None = None,
        concurrency: int = 8,
        address: str = "auto",
        min_workers: int = 0,
        max_workers: int = 4,
        idle_s: float = IDLE_S,
        wait_s: float = 5.0,
        runner: str = "async",
        runner_params: dict[str, Json] | None = None,
        cluster: dict[str, Json] | None = None,
    ) -> None:
        _check_concurrency(concurrency)
        if not 0 <= min_workers <= max_workers or max_workers < 1:
            raise ConfigError(
                f"runner.params.min_workers is {min_workers} and max_workers {max_workers}; choose 0 <= min_workers "
                "<= max_workers, and a max_workers of at least 1"
            )
        for name, seconds in (("idle_s", idle_s), ("wait_s", wait_s)):
            if seconds <= 0:
                raise ConfigError(f"runner.params.{name} is {seconds:g}; write seconds above 0")
        _check_address(address, cluster or {})
        share = share_of("each worker", placement, cpus=WORKER_CPUS)
        if share.strategy.startswith("STRICT"):
            raise ConfigError(
                f"runner.resources.strategy is {share.strategy!r}; workers come and go, so write PACK or SPREAD"
            )
        self._pool_settings = PoolSettings(
            share=share, at_once=concurrency, fewest=min_workers, most=max_workers, idle_s=idle_s, wait_s=wait_s
        )
        self._address = address
        self._started = dict(cluster or {})
        self._attempts = (runner, dict(runner_params or {}))
        self._cluster: Cluster | None = None
        self._reservation: Reservation | None = None
        self._room: Reservation | None = None
        self._pool: Pool | None = None

    @property
    def most_attempts(self) -> int:
        """The most attempts that all workers together run at once."""
        return self._pool_settings.at_once * self._pool_settings.most

    def attempts(self) -> tuple[str, dict[str, Json]]:
        """Return the name and the parameters of the runner in each worker."""
        return self._attempts

    async def check(self, algorithms: Sequence[AlgorithmConfig]) -> list[str]:
        """Check that the shares fit on the cluster, or on this machine if none is running; return a layout as text."""
        shares = _shares(algorithms)
        if not has_cluster(self._address):
            machines = [this_machine(self._started)]
            return [f"Ray: a new cluster on this machine, with {_have(machines)}", *self._layout(shares, machines)]
        cluster = Cluster(self._address, started=self._started)
        await cluster.connect()
        try:
            machines = await cluster.machines()
            count = f"{len(machines)} machine{'' if len(machines) == 1 else 's'}"
            return [f"Ray: a cluster of {count}, with {_have(machines)}", *self._layout(shares, machines)]
        finally:
            await cluster.disconnect()

    async def reserve(self, algorithms: Sequence[AlgorithmConfig]) -> None:
        """Connect to the cluster, reserve the algorithms' shares, and then the share of a first worker."""
        self._cluster = cluster = Cluster(self._address, started=self._started)
        shares = _shares(algorithms)
        if not has_cluster(self._address):
            self._layout(shares, [this_machine(self._started)])  # before a start that takes seconds
        await cluster.connect()
        self._layout(shares, await cluster.machines())
        patience = Patience(self._pool_settings.wait_s)
        self._reservation = Reservation(cluster, patience)
        await self._reservation.make(shares)
        self._room = Reservation(cluster, patience)
        await self._room.make([self._pool_settings.share])

    async def deploy(self, setup: FleetSetup) -> None:
        """Start the pool of workers for an experiment."""
        cluster = _started(self._cluster)
        _check_reach(setup.order.store_url, await cluster.hosts())
        room, self._room = self._room, None
        self._pool = Pool(cluster, self._pool_settings, setup, room=room)
        self._pool.start()

    async def recall(self) -> None:
        """Stop all workers."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.stop()

    def algorithm(self, config: AlgorithmConfig, setup: FleetSetup) -> Algorithm:
        """Return an algorithm that runs on its reserved share."""
        if self._reservation is None:
            raise ConfigError(f"nothing is reserved for the algorithm {config.name!r}")
        place = self._reservation.place_of(_name(config))
        return placed_algorithm(config, cluster=_started(self._cluster), place=place, order=setup.order)

    async def stop(self) -> None:
        """Stop the workers, release all reservations, and leave the cluster."""
        await self.recall()
        held, self._reservation, self._room = (self._reservation, self._room), None, None
        for reservation in held:
            if reservation is not None:
                await reservation.release()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.disconnect()

    def _layout(self, algorithms: Sequence[Share], machines: Sequence[Mapping[str, float]]) -> list[str]:
        """Return the shares as lines of text; raises :class:`ConfigError` if a share does not fit."""
        room = Room(machines)
        missing = room.place(algorithms)
        if missing:
            raise ConfigError(
                f"{no_room(missing[0], machines)}; lower [algorithm.resources], or add a machine that has it"
            )
        settings = self._pool_settings
        fitting = room.count(settings.share, most=settings.most)
        if fitting < max(1, settings.fewest):
            problem = no_room(settings.share, machines)
            raise ConfigError(f"{problem}; lower [runner.resources], or min_workers in [runner.params]")
        lines = [f"{share.name}: {amounts_text(share.amounts)}, {share.strategy}" for share in algorithms]
        bounds = f"{settings.fewest} to {settings.most} workers with {settings.at_once} rollouts each"
        beside = "" if fitting == settings.most else f"; {fitting} of them fit"
        return [*lines, f"{bounds}: {amounts_text(settings.share.amounts)} each{beside}"]


def _check_concurrency(concurrency: int) -> None:
    if not 1 <= concurrency <= LOOP_ROLLOUTS:
        raise ConfigError(
            f"runner.concurrency is {concurrency}, the rollouts at once of each worker; one event loop holds 1 to "
            f"{LOOP_ROLLOUTS}, so choose that and set max_workers in [runner.params] to as many workers as you need"
        )


def _check_address(address: str, cluster: Mapping[str, Json]) -> None:
    if address.startswith("ray://"):
        raise ConfigError(
            f"the address {address!r} is one of Ray's client, which cannot place workers; run agl on a machine of the "
            "cluster and write HOST:PORT of its head, or submit it as a job: ray job submit -- agl run FILE --ray auto"
        )
    host, _, port = address.rpartition(":")
    if address not in ("auto", "local") and not (host and port.isdigit()):
        raise ConfigError(f"the address of the Ray cluster is {address!r}; write auto, local or HOST:PORT")
    if "address" in cluster or "namespace" in cluster:
        raise ConfigError("runner.params.cluster is for a cluster that is started here; write address beside it")


def _check_reach(store_url: str, hosts: set[str]) -> None:
    """Refuse workers on several machines if only this machine reaches their store."""
    is_here = store_url.startswith(("sqlite:", "http://127.", "http://localhost", "http://[::1]"))
    if len(hosts) > 1 and is_here:
        raise ConfigError(
            f"the Ray cluster has {len(hosts)} machines, and workers reach the experiment at {store_url}, which is "
            'this machine only; set [gateway] params = { host = "0.0.0.0", port = 4748 }, and advertise = "HOST" if '
            "HOST is not the address that its network interface has"
        )


def _started(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise ConfigError("the Ray cluster is not connected")
    return cluster


def _name(config: AlgorithmConfig) -> str:
    return f"algorithm {config.name!r}"


def _shares(algorithms: Sequence[AlgorithmConfig]) -> list[Share]:
    return [share_of(_name(config), config.resources, cpus=ALGORITHM_CPUS) for config in algorithms]


def _have(machines: Sequence[Mapping[str, float]]) -> str:
    return amounts_text(total(machines, ["CPU", "GPU", "memory"]))
