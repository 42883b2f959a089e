"""Tells in the store how a running experiment can be joined, for workers on other machines.

The record says where the gateway is, which models and versions agents get, and which settings a worker must have too.
It holds addresses and names, never a key. It is the presence of the experiment's own process among the members of the
experiment, which counts every few seconds.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

import agl
from agl.contracts import Presence, Store, Upstream
from agl.errors import ConfigError, StoreError
from agl.schemas import LLM, Json, Record, new_trace_id, to_builtins
from agl.stores import without_credentials
from agl_run.experiment.plan import Plan
from agl_run.runners.liveness import place

_LOG = logging.getLogger("agl_run.experiment")

BEAT_S = 4.0
"""Seconds between two counts of a running experiment."""

FAREWELL_S = 6.0
"""Seconds that an experiment waits at its end for its workers to take leave."""

_LOOK_S = 0.2


class Serving(Record, frozen=True, kw_only=True):
    """A running experiment, as its store knows it.

    Attributes:
        session: Random; every start of the experiment has its own.
        run: Which fresh start it is.
        host: Name of its machine, and ``place`` what tells it from others of that name.
        release: Version of agl.
        gateway_url: The gateway's base URL for other machines, ``""`` where calls are recorded by who runs the agent.
        upstreams: The policies, without keys.
        endpoints: For every policy the LLM that agents get; the endpoint is the gateway's, if there is one.
        live: The live version of every resource.
        requires_calls: Whether a successful attempt without any model call is a failure.
        settings: What a worker's experiment file must say too.
        beat: Counts while the experiment runs.
    """

    session: str
    run: int
    host: str
    place: str
    release: str
    gateway_url: str = ""
    upstreams: tuple[Upstream, ...] = ()
    endpoints: dict[str, LLM] = {}
    live: dict[str, str] = {}
    requires_calls: bool = False
    settings: dict[str, Json] = {}
    beat: int = 0


OWNER = ""
"""The member that runs the experiment; workers elsewhere go by their names."""


async def load_serving(store: Store, name: str) -> Serving | None:
    """The running experiment, ``None`` when none runs or it ended in order."""
    for presence in await store.presences(name, member=OWNER):
        found = {**presence.details, "session": presence.session, "beat": presence.beat}
        return msgspec.convert(found, Serving)
    return None


async def require_alone(store: Store, name: str, *, patience_s: float = 1.5 * BEAT_S) -> None:
    """Refuse to run an experiment that another machine runs; takes ``patience_s`` when one there was killed.

    Raises:
        ConfigError: It runs there; names the machine. Two trainers of one machine meet at their lock instead.
    """
    found = await load_serving(store, name)
    if found is None or found.place == place():
        return
    await asyncio.sleep(patience_s)
    again = await load_serving(store, name)
    if again is not None and again.session == found.session and again.beat != found.beat:
        raise ConfigError(
            f"experiment {name!r} runs already on {found.host!r}, with the same store; wait for it, stop it, or use "
            "another [experiment] name. To run its rollouts here too, use `agl worker`"
        )


async def withdraw(store: Store, name: str) -> None:
    """Remove the record of an experiment that ended, or that starts anew and was killed before."""
    await store.withdraw(name, [OWNER])


def settings_of(plan: Plan) -> dict[str, Json]:
    """The settings that decide what an attempt does and earns, wherever it runs."""
    config = plan.config
    settings: dict[str, Json] = {
        "experiment.hidden": list(config.experiment.hidden),
        "tracers": list(config.tracers),
        "reward": [{"use": item.use, "params": item.params} for item in config.reward],
    }
    agent: Json = list(plan.agent.command) or plan.agent.path
    return {**settings, "experiment.agent": agent} if agent else settings


class Announcement:
    """Keeps the record of a running experiment: ``async with Announcement(store, name, serving) as announcement:``."""

    def __init__(self, store: Store, name: str, serving: Serving, *, beat_s: float = BEAT_S) -> None:
        self._store = store
        self._name = name
        self._serving = serving
        self._beat_s = beat_s
        self._since = time.time()
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Announcement":
        """Write it, and count from now on."""
        await self._write()
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Remove it and wait a moment for the workers to notice; a store that does not answer is left as it is."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        try:
            await withdraw(self._store, self._name)
            await self._see_workers_off()
        except StoreError as error:
            _LOG.warning("workers elsewhere could not be told that experiment %r ended: %s", self._name, error)

    async def update(self, live: Mapping[str, str]) -> None:
        """Tell which versions are live now."""
        self._serving = msgspec.structs.replace(self._serving, live=dict(live))
        await self._write()

    async def _write(self) -> None:
        serving = self._serving
        presence = Presence(
            experiment=self._name,
            member=OWNER,
            session=serving.session,
            since=self._since,
            beat=serving.beat,
            details=to_builtins(serving),
        )
        await self._store.announce(presence)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            self._serving = msgspec.structs.replace(self._serving, beat=self._serving.beat + 1)
            try:
                await self._write()
            except StoreError as error:
                _LOG.warning("experiment %r could not say that it still runs: %s", self._name, error)

    async def _see_workers_off(self) -> None:
        """Workers whose store is this experiment's own gateway read the end there, so it stays open a moment."""
        for _ in range(int(FAREWELL_S / _LOOK_S)):
            if not await self._store.presences(self._name):
                return
            await asyncio.sleep(_LOOK_S)
        await self._store.withdraw(self._name, [left.member for left in await self._store.presences(self._name)])


def make_serving(
    plan: Plan,
    *,
    run: int,
    gateway_url: str,
    upstreams: Sequence[Upstream],
    endpoints: Mapping[str, LLM],
    live: Mapping[str, str],
    requires_calls: bool,
) -> Serving:
    """The record of an experiment that starts now; keys that stand in addresses are left out."""
    return Serving(
        session=new_trace_id(),
        run=run,
        host=socket.gethostname(),
        place=place(),
        release=agl.__version__,
        gateway_url=gateway_url,
        upstreams=tuple(_public(upstream) for upstream in upstreams),
        endpoints={
            name: msgspec.structs.replace(llm, endpoint=without_credentials(llm.endpoint), api_key="")
            for name, llm in endpoints.items()
        },
        live=dict(live),
        requires_calls=requires_calls,
        settings=settings_of(plan),
    )


def _public(upstream: Upstream) -> Upstream:
    return msgspec.structs.replace(upstream, base_url=without_credentials(upstream.base_url), replicas=())
