"""The worker that a fleet starts, and the order that describes its work."""

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from agl import PluginManager
from agl.contracts import RolloutQuery, Store
from agl.errors import ConfigError
from agl.schemas import ErrorInfo, Outcome
from agl.stores import read_recordings
from agl.urls import without_credentials
from agl_inspect.presence import worker_is_dead
from agl_inspect.stores import build_store
from agl_run.access.secret import SECRET_ENV, SECRET_FILE_ENV
from agl_run.access.tokens import AttemptTokens
from agl_run.access.worker_token import WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV
from agl_run.config.sections import ExperimentConfig
from agl_run.plan import Plan
from agl_run.worker.admission import make_worker_plan
from agl_run.worker.heap import settle_heap
from agl_run.worker.remote import RemoteWorker, Tell

WORKER_DAYS = 30.0
"""Lifetime in days of the token of a fleet's worker; the token is never renewed."""

_KEYS = (SECRET_ENV, SECRET_FILE_ENV, WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV)
"""Environment variables that an order sets or removes, because the machine's values may be for other stores."""


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """Everything that a process on another machine needs to run attempts of an experiment; can be pickled.

    Attributes:
        config: The experiment's configuration, with the runner that each worker uses.
        folder: Base of relative paths, which must be the same on all machines.
        store_url: The store's URL for the worker.
        secret: Keys of attempt tokens, one per line, of which the first one signs; ``""`` if ``token`` is set instead.
        token: The worker's token, for a store that a gateway serves.
        plugins: Environment variables that make the worker load the same plugins.
    """

    config: ExperimentConfig
    folder: str
    store_url: str
    secret: str = field(repr=False)
    plugins: dict[str, str]
    token: str = field(default="", repr=False)

    def for_worker(self) -> "WorkerOrder":
        """Return a copy of the order without keys, and with a token that is valid only for this experiment.

        The order is returned unchanged if workers open the store themselves, which requires no token, or if the
        store's URL already contains one.
        """
        if (
            not self.store_url.startswith(("http://", "https://"))
            or without_credentials(self.store_url) != self.store_url
        ):
            return self
        # Nobody renews the token, so it has to outlast the run.
        expires_at = time.time() + WORKER_DAYS * 86_400
        name = self.config.experiment.name
        token = AttemptTokens(lambda: self.secret.encode()).issue_for_worker(name, expires_at=expires_at)
        return replace(self, secret="", token=token)

    def open_store(self) -> tuple[PluginManager, Store]:
        """Set the environment variables of the order, and open its store, which the caller closes."""
        # A machine may have keys of its own for other stores, and two of them together are refused.
        for name in _KEYS:
            os.environ.pop(name, None)
        os.environ.update(
            {**self.plugins, **({WORKER_TOKEN_ENV: self.token} if self.token else {SECRET_ENV: self.secret})}
        )
        manager = PluginManager.from_environment()
        return manager, build_store(manager, self.store_url)


class OrderedWorker:
    """Runs attempts in this process, as ``agl worker`` does, until the experiment is finished.

    The process must be used for nothing else, because its garbage collection is reconfigured.

    Args:
        order: The experiment to work for.
        tell: Reports events: ``tell(event, text, **values)``.
        reclaims: Whether to end the attempts of dead processes on this machine without waiting for their leases to end.
    """

    def __init__(self, order: WorkerOrder, *, tell: Tell, reclaims: bool = False) -> None:
        self._order = order
        self._tell = tell
        self._reclaims = reclaims
        self._worker: RemoteWorker | None = None

    @property
    def held(self) -> int:
        """The number of attempts that this worker holds."""
        return self._worker.held if self._worker is not None else 0

    async def run(self) -> dict[str, int]:
        """Run attempts, and return the number of finished rollouts by status; when cancelled, give attempts back.

        Raises:
            ConfigError: The experiment is running, and this machine cannot join it.
            PluginError: A component is not installed on this machine.
        """
        manager, store = self._order.open_store()
        try:
            plan = make_worker_plan(self._order.config, folder=Path(self._order.folder), manager=manager)
            # After the imports: what exists now lives as long as the process.
            settle_heap()
            # Only a process that replaces one on the same machine may judge which of its attempts
            # are dead.
            if self._reclaims:
                await reclaim_lost(store, plan.name)
            at_once = plan.config.runner.concurrency
            self._worker = RemoteWorker(plan, store, tell=self._tell, concurrency=at_once)
            return await self._worker.run()
        finally:
            await store.close()


def order_of(plan: Plan, *, store_url: str, secret: bytes) -> WorkerOrder:
    """Make the order for workers on other machines; raises :class:`ConfigError` if they cannot import the agent."""
    agent = plan.agent
    # Placements are the fleet's affair; a worker has no fleet, and would refuse them.
    algorithms = tuple(msgspec.structs.replace(algorithm, resources=None) for algorithm in plan.config.algorithm)
    config = msgspec.structs.replace(plan.config, algorithm=algorithms)
    if agent.is_imported:
        if not agent.path:
            raise ConfigError(
                "workers in other processes import the agent, so it must be importable: move it to a module and pass "
                "'module:attribute'; functions of the main script or within functions are not"
            )
        # The object that was passed to the trainer cannot travel; its import path can.
        section = msgspec.structs.replace(config.experiment, agent=agent.path)
        config = msgspec.structs.replace(config, experiment=section)
    return WorkerOrder(
        config=config,
        folder=str(plan.folder.absolute()),
        store_url=store_url,
        secret=secret.decode(),
        plugins=plan.manager.worker_env(),
    )


async def reclaim_lost(store: Store, experiment: str) -> None:
    """End the attempts of workers that died on this machine, instead of waiting until their leases end."""
    query = RolloutQuery(experiment=experiment, status=("running",))
    lost = [
        attempt
        async for recording in read_recordings(store, query, spans="none")
        for attempt in recording.attempts
        # Only processes of this machine can be known to be dead; others keep their lease.
        if attempt.status == "running" and worker_is_dead(attempt.worker)
    ]
    for attempt in lost:
        message = f"worker {attempt.worker!r} ended while it ran attempt {attempt.attempt_id}"
        error = ErrorInfo(type="agl.WorkerDied", message=message)
        await store.finish([Outcome(attempt_id=attempt.attempt_id, status="lost", error=error)])
