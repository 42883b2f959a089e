"""The record of a running experiment in its store; workers on other machines learn from it how to join.

The record holds the gateway's URL, the models and versions that agents get, and the settings that a worker must share;
it never holds a key. It is part of the trainer's presence, so it lasts as long as the trainer's lease.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

import agl
from agl.contracts import RolloutQuery, Store, Upstream
from agl.errors import FencedError, StoreError
from agl.schemas import LLM, Json, Record, RolloutStatus, to_builtins
from agl.urls import without_credentials
from agl_inspect.ownership import Ownership
from agl_inspect.presence import OWNER, host_of, is_of_this_machine
from agl_run.plan import Plan
from agl_run.runners.setup import RunContext

_LOG = logging.getLogger("agl_run.run")

FAREWELL_S = 6.0
"""Seconds that an ending experiment waits for its workers to sign off."""

_LOOK_S = 0.2

UNCLAIMED_S = 5.0
"""Seconds before unclaimed rollouts are first reported; each further wait is twice the previous one."""

LONGEST_UNCLAIMED_S = 120.0


class Announcement(Record, frozen=True, kw_only=True):
    """The announcement of a running experiment in its store.

    Attributes:
        run: The number of the run.
        release: Version of agl.
        gateway_url: The gateway's base URL for other machines; ``""`` if each worker records calls itself.
        upstreams: The policies, without keys.
        endpoints: For each policy, the LLM that agents get; its endpoint is the gateway's, if there is a gateway.
        live: The live version of every resource.
        requires_calls: Whether an attempt that succeeds without any model call counts as failed.
        settings: Settings that must be equal in a worker's experiment file.
        session: Name of the trainer; a resume gets a new one.
        seen_at: Time of the trainer's last sign of life, in Unix seconds by the store's clock.
    """

    run: int
    release: str
    gateway_url: str = ""
    upstreams: tuple[Upstream, ...] = ()
    endpoints: dict[str, LLM] = {}
    live: dict[str, str] = {}
    requires_calls: bool = False
    settings: dict[str, Json] = {}
    session: str = ""
    seen_at: float = 0.0

    @property
    def host(self) -> str:
        """Host name of the machine on which the experiment runs."""
        return host_of(self.session)

    @property
    def is_of_this_machine(self) -> bool:
        """True if the experiment runs on this machine."""
        return is_of_this_machine(self.session)


async def load_running(store: Store, name: str) -> Announcement | None:
    """Read the record of the running experiment; ``None`` without one. The record of a killed experiment remains."""
    for presence in await store.presences(name, member=OWNER):
        # A trainer that starts or ends has a presence, but nothing to join.
        if "run" in presence.details:
            found = {**presence.details, "session": presence.session, "seen_at": presence.seen_at}
            return msgspec.convert(found, Announcement)
    return None


def settings_of(plan: Plan) -> dict[str, Json]:
    """Return the settings that must be equal on all machines, because they influence attempts and rewards."""
    config = plan.config
    settings: dict[str, Json] = {
        "experiment.hidden": list(config.experiment.hidden),
        "tracers": list(config.tracers),
        "reward": [{"use": item.use, "params": item.params} for item in config.reward],
    }
    agent: Json = list(plan.agent.command) or plan.agent.path or plan.agent.harness
    if plan.agent.source:
        agent = plan.agent.identity
        settings["experiment.agent_args"] = dict(plan.agent.args)
    return {**settings, "experiment.agent": agent} if agent else settings


class Invitation:
    """Lets workers on other machines join the experiment.

    Use it as a context manager: ``async with Invitation(ownership, running):``.
    """

    def __init__(self, ownership: Ownership, running: Announcement) -> None:
        self._ownership = ownership
        self._running = running

    async def __aenter__(self) -> "Invitation":
        """Write the experiment's record to the store."""
        await self._ownership.announce(to_builtins(self._running))
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Remove the record, and wait a moment for the workers to sign off; errors of the store are only logged."""
        try:
            # The absence of the record is how workers learn of an orderly end.
            await self._ownership.announce({})
            await self._see_workers_off()
        except FencedError:
            pass  # the record belongs to the trainer that took over
        except StoreError as error:
            name = self._ownership.name
            _LOG.warning("the store could not record for remote workers that experiment %r ended: %s", name, error)

    async def update(self, live: Mapping[str, str]) -> None:
        """Replace the live versions in the record."""
        # Workers read the live versions here for resources that a rollout does not pin.
        self._running = msgspec.structs.replace(self._running, live=dict(live))
        await self._ownership.announce(to_builtins(self._running))

    async def _see_workers_off(self) -> None:
        """Wait until the workers have signed off, because some need the experiment's gateway for that."""
        store, name = self._ownership.store, self._ownership.name
        end = time.monotonic() + FAREWELL_S
        while left := [presence.member for presence in await store.presences(name) if presence.member != OWNER]:
            if time.monotonic() > end:
                # Workers that were killed never sign off; their entries must not greet the next run.
                return await store.withdraw(name, left)
            await asyncio.sleep(_LOOK_S)


def make_running(
    plan: Plan, context: RunContext, *, run: int, gateway_url: str, endpoints: Mapping[str, LLM], live: dict[str, str]
) -> Announcement:
    """Make the record of an experiment that is about to start; keys in URLs are removed."""
    return Announcement(
        run=run,
        release=agl.__version__,
        gateway_url=gateway_url,
        # Every reader of the store can read the record, so keys are removed from URLs.
        upstreams=tuple(_public(upstream) for upstream in context.upstreams),
        endpoints={
            name: msgspec.structs.replace(llm, endpoint=without_credentials(llm.endpoint), api_key="")
            for name, llm in endpoints.items()
        },
        live=live,
        requires_calls=context.requires_calls,
        settings=settings_of(plan),
    )


def _public(upstream: Upstream) -> Upstream:
    return msgspec.structs.replace(upstream, base_url=without_credentials(upstream.base_url), replicas=())


class UnclaimedReport:
    """Reports queued rollouts that no worker claims.

    Use it as a context manager: ``async with UnclaimedReport(store, name, say=print):``.
    """

    def __init__(self, store: Store, name: str, *, say: Callable[[str], None], first_s: float = UNCLAIMED_S) -> None:
        self._store = store
        self._name = name
        self._say = say
        self._first_s = first_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "UnclaimedReport":
        """Start to check for unclaimed rollouts."""
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop the checks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        pause = self._first_s
        while True:
            await asyncio.sleep(pause)
            try:
                # A running rollout proves that there is a worker, which may simply be busy.
                is_idle = await self._has("queued") and not await self._has("running")
            except StoreError as error:
                _LOG.warning("the queue could not be read to check for workers: %s", error)
                continue
            if is_idle:
                self._say(
                    f"rollouts wait and no worker claims them ([runner] concurrency is 0); start one, here or on "
                    f"another machine: agl worker FILE, with the file of experiment {self._name!r}"
                )
                # A reminder, not an alarm: nobody may have started a worker yet.
                pause = min(2 * pause, LONGEST_UNCLAIMED_S)
            else:
                pause = self._first_s

    async def _has(self, status: RolloutStatus) -> bool:
        query = RolloutQuery(experiment=self._name, status=(status,), limit=1)
        return bool(await self._store.rollouts(query))
