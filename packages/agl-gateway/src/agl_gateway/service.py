"""Assembles the gateway's parts, and starts and stops them in one event loop."""

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from agl.contracts import Store, Upstream
from agl.errors import ConfigError
from agl.schemas import new_trace_id
from agl_gateway.access.audit import Audit
from agl_gateway.access.certificate import Certificate
from agl_gateway.access.identity import Admission, Identities, RunningAttempts
from agl_gateway.access.quotas import Quotas
from agl_gateway.access.worker_tokens import WORKER_TOKENS, TokensApi
from agl_gateway.processes.announcement import GatewayPresence
from agl_gateway.processes.attempt_facts import PATH, AttemptFacts, AttemptFactsApi
from agl_gateway.processes.peers import Group, Peers, Siblings
from agl_gateway.record.outage import Outage
from agl_gateway.record.recorder import Recorder
from agl_gateway.record.redaction import Redaction
from agl_gateway.record.spool_file import SpoolFile
from agl_gateway.record.traces import TracesApi
from agl_gateway.relay.bodies import BodyReader, ByteBudget
from agl_gateway.relay.callers import HelperRules, Owners
from agl_gateway.relay.dispatcher import Dispatcher, Handle
from agl_gateway.relay.pictures import Pictures
from agl_gateway.relay.relay import Relay
from agl_gateway.relay.routing import Router
from agl_gateway.relay.sampling import SamplingRules
from agl_gateway.relay.sender import ClientApis, Sender, make_session
from agl_gateway.settings import Settings
from agl_gateway.status.api import OWN_METRICS, StatusAccess, StatusApi
from agl_gateway.store_api.feed import Feed, QueueLength
from agl_gateway.store_api.methods import StoreApi
from agl_gateway.store_api.worker_reach import WorkerReach
from agl_gateway.store_api.workers import WorkersApi
from agl_gateway.traffic.api import END, RATE, RESOURCES, ConversationsApi, SplitApi
from agl_gateway.traffic.arms import ArmRoutes, policy_of, with_distinct_names
from agl_gateway.traffic.conversations import Conversations
from agl_gateway.traffic.kept_traffic import KeptTraffic, RewardSweep
from agl_gateway.traffic.splits import Splitter, check_labels, pins_of
from agl_gateway.wire.http.server import ConnectionServer
from agl_gateway.wire.http.upstream import Pool
from agl_inspect.keys import Keys
from agl_inspect.records.splits import SERVED, ServedSplit
from agl_run import advertised_url
from agl_run.access import AttemptTokens

_SHUTDOWN_S = 2.0
BACKLOG = 1024
_PEER_KEY_S = 600.0
"""Seconds for which a key for another gateway is valid; long, because the clocks of machines differ."""

_LINGERING_S = 1.0
"""Seconds for which the rest of a refused body is read and dropped, so that its sender can read the answer."""


class GatewayService:
    """A gateway with all of its parts. Construct and use it in one event loop.

    Attributes:
        url: The base URL at which the gateway listens; ``""`` before the start.
        advertised: The base URL for other machines.
        ignored: The split that `agl learn` saved in the store, if the gateway started with another one.

    Args:
        admin_key: A key with the rights of an admin token, or a function that returns such keys, one per line.
        client_key: A key that allows conversations and nothing else, or a function as for ``admin_key``; it turns
            conversations on.
        arms: True to serve the split that the store holds, and to send the calls of rollouts to the versions to which
            they are pinned, as a gateway with several upstreams of one policy always does.
        split: A split to serve instead; turns ``arms`` and conversations on.
        certificate: Makes the gateway listen with TLS only.
        spools: Files for calls that the store does not take at once: the gateway's own first, then those of gateways
            that are gone. Without any, calls wait for the store.
        redaction: Redacts every span before it is recorded.
        group: The processes of a gateway with several processes.
        listener: A socket that already listens, shared by the group; the address in ``settings`` then only names it.
    """

    def __init__(  # noqa: PLR0913  # keyword-only; what each kind of gateway makes for itself
        self,
        *,
        store: Store,
        upstreams: Sequence[Upstream],
        tokens: AttemptTokens,
        settings: Settings,
        admin_key: str | Keys = "",
        client_key: str | Keys = "",
        arms: bool = False,
        split: ServedSplit | None = None,
        certificate: Certificate | None = None,
        spools: Sequence[SpoolFile] = (),
        redaction: Redaction | None = None,
        group: Group | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._listener, self._certificate, self._settings = listener, certificate, settings
        self._start_id = new_trace_id()
        self._gateway_id = _gateway_id(spools, settings) or self._start_id
        self.siblings = Siblings(group, admin_key=self._peer_key)
        self.store = store
        self.tokens = tokens
        self.router = Router(with_distinct_names(upstreams))
        self._split = split
        self.ignored: ServedSplit | None = None
        self._splitter = Splitter(store, split) if arms or split is not None else None
        self._redaction = redaction or Redaction()
        self._outage = Outage(store, is_watched=bool(spools))
        has_versions = any(policy_of(each.upstream) != name for name, each in self.router.targets.items())
        has_arms = arms or split is not None or has_versions
        self._arms = ArmRoutes(store, self.router, outage=self._outage, has_hosts=arms) if has_arms else None
        self._queue = QueueLength(store)
        self.recorder = Recorder(
            store,
            outage=self._outage,
            spools=spools,
            spool_after_s=settings.spool_after_s,
            on_held=self.siblings.held,
            redaction=self._redaction,
        )
        self._presence = GatewayPresence(
            store=store,
            recorder=self.recorder,
            url=lambda: self.advertised,
            start=self._newest_start,
            is_shared=settings.is_shared,
            group="" if group is None else group.group_id,
        )
        share, idle_s = settings.share, settings.conversation_idle_s
        self._traffic = None if share.is_all else KeptTraffic(share, idle_s=idle_s)
        self.attempts = RunningAttempts(store, outage=self._outage)
        self.session = make_session(timeout_s=settings.timeout_s)
        self._pool = Pool(timeout_s=settings.timeout_s)
        self.peers = Peers(
            store=store,
            recorder=self.recorder,
            session=self.session,
            siblings=self.siblings,
            outage=self._outage,
            newest_start=self._newest_start,
            admin_key=self._peer_key,
            is_shared=settings.is_shared,
        )
        self._conversations = self._new_conversations() if split is not None or client_key else None
        self._reach = WorkerReach(store, tokens=tokens, attempts=self.attempts)
        self._feed = Feed(
            store=store,
            on_changes=[part.on_changes for part in (*self._caches(), self._queue)],
            on_gap=self._forget,
        )
        self._facts = AttemptFacts(self.siblings, self.peers)
        self._quotas = Quotas(store, self._facts, max_calls=settings.max_calls, max_spans=settings.max_spans)
        self._budget = ByteBudget(limit=settings.max_bodies // self.siblings.count, wait_s=settings.bodies_wait_s)
        self.identities = Identities(tokens, admin_key=admin_key, client_key=client_key)
        self._admission = Admission(
            identities=self.identities,
            bodies=BodyReader(patience_s=settings.body_s, budget=self._budget, max_body=settings.max_body),
            audit=Audit(Path(settings.audit_log) if settings.audit_log else None),
        )
        self._pictures = Pictures(settings.fetch_media, self._budget) if settings.fetch_media else None
        self.relay = Relay(
            bodies=self._admission.bodies,
            owners=Owners(
                facts=self._facts,
                helpers=HelperRules(is_on=settings.helpers, match=settings.helper_match),
                conversations=self._conversations,
                traffic=self._traffic,
            ),
            router=self.router,
            arms=self._arms,
            sampling=SamplingRules(store=store, outage=self._outage, position=self._facts.position),
            sender=Sender(
                pool=self._pool,
                session=self.session,
                apis=ClientApis(settings.native_apis),
                max_answer=settings.max_answer,
            ),
            recorder=self.recorder,
            pictures=self._pictures,
        )
        self.routes: tuple[str, ...] = ()
        self._runner: web.ServerRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_running = False
        self.advertised = ""
        self.url = ""

    @property
    def has_conversations(self) -> bool:
        """True if clients may call models without an attempt's token."""
        return self._conversations is not None

    @property
    def spool_path(self) -> Path | None:
        """The gateway's own spool file; ``None`` without a spool."""
        return None if self.recorder.spool is None else self.recorder.spool.file.path

    @property
    def bodies_held(self) -> int:
        """Bytes of large request bodies that the gateway holds in memory now."""
        return self._budget.held

    async def start(self) -> str:
        """Start the gateway; returns its base URL.

        Raises:
            ConfigError: The port is taken, a label of the split does not exist, or no upstream serves its version.
        """
        await self._check_split()
        routes = {**self._routes(), **self._conversation_routes()}
        handler = Dispatcher(
            self.relay,
            admission=self._admission,
            attempts=self.attempts,
            quotas=self._quotas,
            store=self._store_api().handle,
            routes=routes,
        )
        self.routes = handler.routes
        self.recorder.start()
        self._is_running = True
        cursor = await self.store.cursor()
        await self._queue.load()
        self._runner = web.ServerRunner(self._server(handler), shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        self._tasks.append(asyncio.create_task(self._feed.follow(cursor)))
        await self._listen(self._runner)
        port = self._runner.addresses[0][1]
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        scheme = "http" if self._certificate is None else "https"
        self.url = f"{scheme}://{host}:{port}"
        self.advertised = advertised_url(self.url, self._settings.advertise)
        self._tasks += [asyncio.create_task(work) for work in self._periodic_work()]
        return self.url

    def _periodic_work(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the background tasks that run until the gateway stops."""
        yield self._presence.run()
        if self._certificate is not None:
            yield self._certificate.watch()
        if self._conversations is not None:
            yield self._conversations.end_idle_ones()
        if self._traffic is not None and self._traffic.share.reward_threshold is not None:
            yield RewardSweep(self.store, self._traffic).run()

    async def stop(self) -> int:
        """Write all remaining records, then close; idempotent. The store stays open.

        Returns:
            The number of calls left in the spool, because the store does not take them.
        """
        for gate in self.router.gates.values():
            gate.resume()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        is_running, self._is_running = self._is_running, False
        left = await self.recorder.stop()
        if is_running:
            await self._presence.leave(left)
        await self.siblings.close()
        await self.session.close()
        if self._pictures is not None:
            await self._pictures.close()
        self._pool.close()
        self._admission.bodies.close()
        return left

    async def _listen(self, runner: web.ServerRunner) -> None:
        context = self._certificate and self._certificate.context
        where = (self._settings.host, self._settings.port)
        if self._listener is not None:
            # One connection at a time, so that idle processes take the other connections.
            await web.SockSite(runner, self._listener, backlog=1, ssl_context=context).start()
            self._listener.listen(BACKLOG)
        else:
            try:
                await web.TCPSite(runner, *where, backlog=BACKLOG, ssl_context=context).start()
            except OSError as error:
                raise bind_error(*where, error) from error
        if (group := self.siblings.group) is not None:
            await web.UnixSite(runner, str(group.socket(group.number))).start()

    def _newest_start(self) -> str:
        return self._start_id if self.siblings.group is None else self.siblings.group.start

    def _peer_key(self) -> str:
        return self.tokens.issue("", "", expires_at=time.time() + _PEER_KEY_S, scope="admin")

    def _routes(self) -> dict[str, Handle]:
        admission = self._admission
        traces = TracesApi(
            store=self.store,
            admission=admission,
            stored=self.recorder.stored,
            attempts=self.attempts,
            quotas=self._quotas,
            redaction=self._redaction,
        )
        status = StatusApi(
            admission=admission,
            access=StatusAccess(
                self.identities,
                is_protected=self._settings.is_status_protected,
                hosts=(self._settings.host, *self._settings.known_hosts),
            ),
            relay=self.relay,
            recorder=self.recorder,
            queue=self._queue,
            feed=self._feed,
            siblings=self.siblings,
        )
        workers = WorkersApi(
            admission=admission,
            recorder=self.recorder,
            peers=self.peers,
            gateway_id=self._gateway_id,
            reach=self._reach,
        )
        return {
            "POST /v1/traces": traces.handle,
            "GET /": status.root,
            "HEAD /": status.root,
            "GET /identity": workers.identity,
            "POST /settle": workers.settle,
            f"POST {WORKER_TOKENS}": TokensApi(admission=admission, tokens=self.tokens).make,
            f"POST {PATH}": AttemptFactsApi(facts=self._facts, admission=admission).handle,
            "GET /metrics": status.metrics,
            f"POST {OWN_METRICS}": status.own_metrics,
            "GET /healthz": status.health,
            "GET /openapi.json": status.openapi,
        }

    def _store_api(self) -> StoreApi:
        return StoreApi(
            store=self.store,
            admission=self._admission,
            stored=self.recorder.stored,
            settle=self.peers.settle,
            attempts=self.attempts,
            quotas=self._quotas,
            reach=self._reach,
            splitter=None if self._split is None else self._splitter,
            redaction=self._redaction,
        )

    def _caches(self) -> list[RunningAttempts | WorkerReach | ArmRoutes | Conversations]:
        """Return the parts of the gateway that cache rollouts of the store."""
        return [self.attempts, self._reach, *(part for part in (self._arms, self._conversations) if part is not None)]

    def _forget(self) -> None:
        self._outage.begin()  # the drain of the spool looks whether it is true, and ends it
        for part in self._caches():
            part.forget()

    def _conversation_routes(self) -> dict[str, Handle]:
        if self._conversations is None:
            return {}
        admission, conversations = self._admission, self._conversations
        api = ConversationsApi(admission=admission, conversations=conversations, traffic=self._traffic)
        routes: dict[str, Handle] = {f"POST {END}": api.end, f"POST {RATE}": api.rate}
        if self._splitter is None:
            return routes
        split = SplitApi(admission=admission, store=self.store, splitter=self._splitter, conversations=conversations)
        return {**routes, "GET /split": split.report, f"GET {RESOURCES}*": split.resource}

    def _new_conversations(self) -> Conversations:
        """Create the part that records conversations; with a split, it queues them through the splitter."""
        return Conversations(
            store=self.store,
            enqueue=self.store.enqueue if self._splitter is None else self._splitter.enqueue,
            settle=self.peers.settle,
            idle_s=self._settings.conversation_idle_s,
            outage=self._outage,
            redaction=self._redaction,
            traffic=self._traffic,
            is_split=None if self._splitter is None else self._splitter.is_on,
        )

    async def _check_split(self) -> None:
        if self._split is not None and self._arms is not None:
            self.ignored = await SERVED.get(self.store)
            await check_labels(self.store, self._split.shares)
            await self._arms.check(await pins_of(self.store, list(self._split.shares)))
        if self._split is not None and self._traffic is not None:
            raise ConfigError(
                "a split compares its arms by all of their conversations, so none may be left out: take away --split, "
                "or --base-rate and --max-spans-per-minute"
            )

    def _server(self, handler: Dispatcher) -> ConnectionServer:
        return ConnectionServer(
            handler.handle,
            handler.answer,
            headers_s=self._settings.headers_s,
            access_log=None,
            logger=logging.getLogger("agl_gateway.http"),
            keepalive_s=75.0,
            lingering_time=_LINGERING_S,
            auto_decompress=False,
        )


def bind_error(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address on which the gateway cannot listen."""
    return ConfigError(
        f"the gateway cannot listen on {host}:{port} ({error.strerror or error}); another program, perhaps another "
        "`agl serve`, uses that port: stop it, or choose another with --port (0 takes any free one)"
    )


def _gateway_id(spools: Sequence[SpoolFile], settings: Settings) -> str:
    """Return the lasting id of a gateway with a spool: the store's id if other gateways share its work.

    Without a spool the id is ``""``.
    """
    if not spools:
        return ""
    return spools[0].store_id if settings.is_shared else spools[0].gateway_id
