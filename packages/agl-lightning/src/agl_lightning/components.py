"""Components that scripts make and hand to the trainer: tracers, strategies, stores and tasks."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from agl.errors import ConfigError
from agl.schemas import Attempt, Rollout, Span
from agl.stores import MemoryStore, all_spans

S = TypeVar("S")


class DummyTracer:
    """Accepted in place of a tracer and ignored: a trainer finds the tracers of the installed adapters by itself.

    Args:
        settings: Settings of Agent Lightning's tracers, which nothing needs here.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class OtelTracer(DummyTracer):
    """Accepted and ignored: the tracer of OpenTelemetry is always on."""


class AgentOpsTracer(DummyTracer):
    """Accepted and ignored: the tracers of the frameworks record their spans without AgentOps."""


class SharedMemoryExecutionStrategy:
    """Runs attempts in this process, as every trainer does by default.

    Args:
        n_runners: Attempts at once, unless the trainer names a number.
        settings: Settings of Agent Lightning's threads, which nothing needs here.
    """

    def __init__(self, n_runners: int = 1, **settings: Any) -> None:
        self.n_runners = n_runners
        self.settings = settings


class ClientServerExecutionStrategy(SharedMemoryExecutionStrategy):
    """Runs attempts in this process; those on other machines are claimed by ``agl worker``.

    Raises:
        ConfigError: The arguments ask for only one of client and server, or for an address.
    """

    def __init__(self, role: str | None = None, *, n_runners: int = 1, **settings: Any) -> None:
        given = {"role": role, "server_host": settings.get("server_host"), "server_port": settings.get("server_port")}
        wrong = {name: value for name, value in given.items() if value not in (None, "both")}
        if wrong:
            raise ConfigError(
                f"ClientServerExecutionStrategy got {wrong}; here the trainer and its workers find each other in the "
                "store: start the trainer, then `agl worker` on the other machines, see docs/how-to/workers.md"
            )
        super().__init__(n_runners, **settings)


class InMemoryLightningStore(MemoryStore):
    """A store in memory, for a trainer or a runner.

    Args:
        settings: Settings of Agent Lightning's store, which nothing needs here.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
        """Return the spans of one attempt, which may be ``"latest"``, or by default those of all attempts, in order."""
        every = [attempt.attempt_id for attempt in await self.attempts(rollout_id)]
        chosen = ["", *every] if attempt_id is None else every[-1:] if attempt_id == "latest" else [attempt_id]
        return [span for each in chosen for span in await all_spans(self, rollout_id, each)]

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """Return the attempts of a rollout in order."""
        return await self.attempts(rollout_id)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """Return a rollout, ``None`` for an id that the store does not know."""
        from agl.contracts import RolloutQuery

        return next(iter(await self.rollouts(RolloutQuery(ids=(rollout_id,)))), None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"InMemoryLightningStore has no {name!r}; it is a store of this project with query_spans, query_attempts "
            "and get_rollout_by_id besides, see docs/reference/store-contract.md for its methods"
        )


def LightningStoreThreaded(store: S) -> S:  # noqa: N802  # a class there
    """Return the store, which may be used from several threads as it is."""
    return store


class DevTaskLoader:
    """Tasks and resources for ``Trainer(dev=True)``.

    Args:
        tasks: The tasks.
        resources: Resources by name, which replace the trainer's.
        settings: Settings of Agent Lightning's client, which nothing needs here.
    """

    def __init__(self, tasks: Sequence[Any], resources: Mapping[str, Any], **settings: Any) -> None:
        self.tasks = list(tasks)
        self.resources = dict(resources)
        self.settings = settings
