"""``/`` and ``/healthz``, and ``/metrics`` and ``/openapi.json`` for operators and generators."""

import asyncio

from aiohttp import web

from agl.contracts import Store
from agl.errors import StoreError
from agl_gateway.access.identity import Identities, key_of, require_scope
from agl_gateway.access.status_access import StatusAccess
from agl_gateway.processes.siblings import Siblings
from agl_gateway.record.recorder import Recorder
from agl_gateway.relay.relay import Relay
from agl_gateway.status.metrics import Family, SpanRate, labelled, render
from agl_gateway.status.openapi import openapi_document
from agl_gateway.store_api.feed import QueueLength
from agl_gateway.traffic.kept_traffic import KeptTraffic
from agl_gateway.wire.problems import Problem

OWN_METRICS = "/peers/metrics"
"""The path at which a process gives its own metrics to its siblings."""

_HEALTH_LIMIT_S = 5.0


class StatusApi:
    """Answers with metrics, health and the API's description."""

    def __init__(
        self,
        *,
        store: Store,
        access: StatusAccess,
        relay: Relay,
        recorder: Recorder,
        queue: QueueLength,
        rate: SpanRate,
        siblings: Siblings,
        identities: Identities,
        traffic: KeptTraffic | None = None,
    ) -> None:
        self._siblings = siblings
        self._identities = identities
        self._traffic = traffic
        self._access = access
        self._store = store
        self._relay = relay
        self._recorder = recorder
        self._queue = queue
        self._rate = rate

    async def root(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer clients that look whether anything is here before they call a model."""
        del request
        return web.json_response({"service": "agl gateway"})

    async def metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with metrics in Prometheus' text format, with a label for each process where there are several."""
        self._access.check(request)
        queued: Family = ("agl_rollouts_queued", "gauge", "Rollouts that wait for a runner.", len(self._queue))
        text = render([queued, *self._families()]) if self._siblings.group is None else await self._of_all(queued)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def own_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer another process of this gateway with this one's metrics; raises a 403 :class:`Problem` for others."""
        claim = self._identities.verify(key_of(request.headers))
        require_scope(claim, ("admin",), what=f"{OWN_METRICS}, which is for the processes of this gateway,")
        return web.json_response(self._families())

    async def _of_all(self, queued: Family) -> str:
        """Render the metrics of all processes; those of one that does not answer are missing, and it counts as down."""
        group = self._siblings.group
        assert group is not None  # noqa: S101  # the caller looks
        found: dict[int, list[Family]] = await self._siblings.ask_all(OWN_METRICS, {})
        found[group.number] = self._families()
        up = {str(number): float(number in found) for number in range(group.count)}
        own: list[Family] = [
            ("agl_gateway_process_up", "gauge", "Whether a process of the gateway answers.", up),
            (
                "agl_gateway_process_starts_total",
                "counter",
                "Processes of the gateway that were started.",
                group.board.starts,
            ),
        ]
        return render([queued]) + render(own, label="process") + labelled(found)

    def _families(self) -> list[Family]:
        gates, recorder = self._relay.gates, self._recorder
        return [
            (
                "agl_calls_in_flight",
                "gauge",
                "Model calls that a backend works on.",
                {name: gate.in_flight for name, gate in gates.items()},
            ),
            (
                "agl_calls_held",
                "gauge",
                "Model calls that wait for a weight update.",
                {name: gate.held for name, gate in gates.items()},
            ),
            ("agl_calls_total", "counter", "Model calls let through.", {n: g.total for n, g in gates.items()}),
            (
                "agl_calls_rerouted_total",
                "counter",
                "Model calls sent to another server of their policy because theirs did not answer.",
                {name: target.replicas.rerouted for name, target in self._relay.router.targets.items()},
            ),
            ("agl_helper_calls_total", "counter", "Helper calls of coding agents.", self._relay.helper_calls),
            (
                "agl_calls_not_recorded_total",
                "counter",
                "Calls of conversations outside the share that is kept.",
                self._traffic.calls if self._traffic else 0,
            ),
            (
                "agl_conversations_removed_total",
                "counter",
                "Conversations removed because their reward did not reach the threshold.",
                self._traffic.removed if self._traffic else 0,
            ),
            ("agl_spans_total", "counter", "Spans written to the store.", self._rate.total),
            ("agl_spans_per_second", "gauge", "Spans written, over ten seconds.", self._rate.per_second()),
            ("agl_spans_lost_total", "counter", "Spans that the store refused.", recorder.lost),
            ("agl_span_queue_length", "gauge", "Calls that are not in the store yet.", recorder.pending),
            ("agl_span_queue_bytes", "gauge", "Bytes of those calls.", recorder.pending_bytes),
            ("agl_span_queue_age_seconds", "gauge", "Age of the oldest of them.", recorder.pending_s),
            (
                "agl_spool_length",
                "gauge",
                "Those of them that lie in the spool.",
                recorder.spool.calls if recorder.spool else 0,
            ),
            ("agl_capture_queue_length", "gauge", "Those of them that are in memory.", recorder.queued),
            ("agl_capture_queue_bytes", "gauge", "Bytes of those in memory.", recorder.queued_bytes),
        ]

    async def health(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer 200 if the store answers, or the spool takes the calls meanwhile; else 503 with the error."""
        del request
        processes = self._processes()
        try:
            async with asyncio.timeout(_HEALTH_LIMIT_S):
                await self._store.cursor()
        except (StoreError, TimeoutError) as error:
            told = str(error) or "no answer"
            if self._takes_calls():
                return web.json_response({"status": "spooling", "store": told, **processes})
            return web.json_response({"status": "failing", "store": told, **processes}, status=503)
        return web.json_response({"status": "ok", **processes})

    def _processes(self) -> dict[str, str]:
        """Return how many of several processes serve; one that was killed is back in a moment."""
        group = self._siblings.group
        if group is None:
            return {}
        serving = sum(not self._siblings.is_away(number) for number in range(group.count))
        return {"processes": f"{serving} of {group.count}"}

    def _takes_calls(self) -> bool:
        if self._recorder.spool is None:
            return False
        try:
            self._recorder.spool.check_room()
        except Problem:
            return False
        return True

    async def openapi(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the API's OpenAPI document."""
        self._access.check(request)
        return web.json_response(openapi_document(server=f"{request.scheme}://{request.host}"))
