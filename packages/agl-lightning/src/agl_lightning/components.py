"""Components that scripts make and hand to the trainer: tracers, strategies, stores and tasks."""

import os
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any, TypeVar

from agl.contracts import RolloutQuery
from agl.errors import ConfigError
from agl.schemas import Attempt, Mode, Resource, ResourceVersion, Rollout, RolloutStatus, Span, new_rollout_id
from agl.stores import MemoryStore, all_spans

S = TypeVar("S")

_DEFAULTS = {"main_process": "algorithm"}


class DummyTracer:
    """Accepted in place of a tracer and ignored: a trainer finds the tracers of the installed adapters by itself.

    Args:
        settings: Settings of Agent Lightning's tracers, which nothing needs here.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}; every rollout is recorded without it, and its spans are in the "
            "store: await store.query_spans(rollout_id), see docs/how-to/agent-lightning.md"
        )


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
        given = {
            "role": role,
            **{name: settings.get(name) for name in ("server_host", "server_port", "main_process")},
            **{name: os.environ.get(name) for name in ("AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT")},
        }
        wrong = {name: value for name, value in given.items() if value not in (None, "", "both", _DEFAULTS.get(name))}
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

    async def query_rollouts(
        self, *, status_in: Sequence[RolloutStatus] | None = None, rollout_id_in: Sequence[str] | None = None
    ) -> list[Rollout]:
        """Return all rollouts, or those with one of the statuses and one of the ids."""
        query, found = RolloutQuery(status=tuple(status_in or ()), sort="created_at"), list[Rollout]()
        while page := await self.rollouts(query):
            found += [one for one in page if rollout_id_in is None or one.rollout_id in rollout_id_in]
            query = query.next(page[-1])
        return found

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """Return a rollout, ``None`` for an id that the store does not know."""
        return next(iter(await self.query_rollouts(rollout_id_in=[rollout_id])), None)

    async def enqueue_rollout(
        self, input: Any, mode: Mode | None = None, *, metadata: Mapping[str, Any] | None = None
    ) -> Rollout:
        """Queue one run of the agent on ``input``, for a runner or a worker."""
        made = Rollout(rollout_id=new_rollout_id(), task=input, mode=mode or "train", metadata=dict(metadata or {}))
        return (await self.enqueue([made]))[0]

    async def add_resources(self, resources: Mapping[str, Resource]) -> list[ResourceVersion]:
        """Publish a version of each resource, which rollouts get from now on; returns the versions."""
        made = [
            ResourceVersion(name=name, version=token_hex(8), resource=resource) for name, resource in resources.items()
        ]
        await self.publish(made)
        return made

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"InMemoryLightningStore has no {name!r}; it has the methods of docs/reference/store-contract.md, and "
            "query_rollouts, query_attempts, query_spans, get_rollout_by_id, enqueue_rollout and add_resources"
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
