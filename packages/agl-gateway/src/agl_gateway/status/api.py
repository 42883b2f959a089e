"""Serves ``/`` and ``/healthz`` to everyone, and ``/metrics`` and ``/openapi.json`` to operators and tools.

The last two need no token if the request's ``Host`` is a known name of this gateway. Otherwise a page in a browser
could read both, by giving its own host name this machine's address (DNS rebinding). It can do so neither with an
address in place of a name nor for requests with a token, because it has none.
"""

import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from agl.served_calls import CallGate
from agl_gateway.access.identity import Admission, Identities, key_of, require_scope
from agl_gateway.processes.peers import Siblings
from agl_gateway.record.recorder import Recorder
from agl_gateway.relay.relay import Relay
from agl_gateway.status.openapi import openapi_document
from agl_gateway.store_api.feed import Feed, QueueLength
from agl_gateway.wire.problems import Problem

Family = tuple[str, str, str, Mapping[str, float] | float]
"""A metric: name, type, help text, and either one number or a number per label value."""


OWN_METRICS = "/peers/metrics"
"""The path on which a process serves its own metrics to its siblings."""


class StatusAccess:
    """Checks requests for the gateway's status.

    Args:
        is_protected: True if every request needs the admin token.
        hosts: Host names of the gateway, in addition to ``localhost``, this machine's name and all addresses.
    """

    def __init__(self, identities: Identities, *, is_protected: bool, hosts: Collection[str]) -> None:
        self._identities = identities
        self._is_protected = is_protected
        self._hosts = {name.lower() for name in ("localhost", socket.gethostname(), *hosts)}

    def check(self, request: web.BaseRequest) -> None:
        """Raise a 401 or 403 :class:`Problem` unless the request names a known host or carries the admin token."""
        host, key = request.headers.get("host", ""), key_of(request.headers)
        if not self._is_protected:
            if self._is_known(host):
                return
            if not key:
                raise Problem(
                    403,
                    f"the request is for the host {host!r}, by which this gateway is not known; ask for its address, "
                    "send the admin token, or start it with --allow-host",
                )
        require_scope(self._identities.verify(key), ("admin",), what=f"{request.path} here")

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with suppress(ValueError):
            return bool(ip_address(name))
        return not host or name in self._hosts


@dataclass(frozen=True, eq=False, kw_only=True)
class StatusApi:
    """Answers with metrics, health and the API's description."""

    admission: Admission
    access: StatusAccess
    relay: Relay
    recorder: Recorder
    queue: QueueLength
    feed: Feed
    siblings: Siblings

    async def root(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer clients that check that a server listens here before they call a model."""
        del request
        return web.json_response({"service": "agl gateway"})

    async def metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with metrics in Prometheus' text format; several processes get a ``process`` label."""
        self.access.check(request)
        queued = _gauge("agl_rollouts_queued", "Rollouts that wait for a runner.", len(self.queue))
        text = render([queued, *self._families()]) if self.siblings.group is None else await self._of_all(queued)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def own_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a sibling process with this process's metrics; raises a 403 :class:`Problem` for other callers."""
        self.admission.caller(request, "admin", what=f"{OWN_METRICS}, which is for the processes of this gateway,")
        return web.json_response(self._families())

    async def _of_all(self, queued: Family) -> str:
        """Render the metrics of all processes; a process that does not answer is reported as down."""
        group = self.siblings.group
        assert group is not None  # noqa: S101  # the caller looks
        found: dict[int, list[Family]] = await self.siblings.ask_all(OWN_METRICS, {})
        found[group.number] = self._families()
        up = {str(number): float(number in found) for number in range(group.count)}
        starts = group.board.starts
        own = [
            _gauge("agl_gateway_process_up", "Whether a process of the gateway answers.", up),
            _counter("agl_gateway_process_starts_total", "Processes of the gateway that were started.", starts),
        ]
        return render([queued]) + render(own, label="process") + labelled(found)

    def _families(self) -> list[Family]:
        relay, recorder = self.relay, self.recorder
        gates, traffic, spool = relay.router.gates, relay.owners.traffic, recorder.spool
        rerouted = {name: target.replicas.load.failures.total() for name, target in relay.router.targets.items()}
        return [
            _gauge("agl_calls_in_flight", "Model calls that a backend works on.", _each(gates, "in_flight")),
            _gauge("agl_calls_held", "Model calls that wait for a weight update.", _each(gates, "held")),
            _counter("agl_calls_total", "Model calls let through.", _each(gates, "total")),
            _counter("agl_calls_rerouted_total", "Model calls that another server of their policy answered.", rerouted),
            _counter("agl_helper_calls_total", "Helper calls of coding agents.", relay.owners.helper_calls),
            _counter(
                "agl_calls_not_recorded_total",
                "Calls of conversations outside the share to record.",
                traffic.calls if traffic else 0,
            ),
            _counter(
                "agl_conversations_removed_total",
                "Conversations removed because their reward did not reach the threshold.",
                traffic.removed if traffic else 0,
            ),
            _counter("agl_spans_total", "Spans written to the store.", recorder.stored.total),
            _counter("agl_spans_lost_total", "Spans that the store refused.", recorder.lost),
            _gauge("agl_span_queue_length", "Calls that are not in the store yet.", recorder.pending),
            _gauge("agl_span_queue_bytes", "Bytes of those calls.", recorder.pending_bytes),
            _gauge("agl_span_queue_age_seconds", "Age of the oldest of them.", recorder.pending_s),
            _gauge("agl_spool_length", "Those of them that lie in the spool.", spool.calls if spool else 0),
            _gauge("agl_capture_queue_length", "Those of them that are in memory.", recorder.queued),
            _gauge("agl_capture_queue_bytes", "Bytes of the queued spans in memory.", recorder.queued_bytes),
        ]

    async def health(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer 200 while calls can be recorded; 503 while the store does not answer and no spool takes them.

        The answer tells what the gateway has seen of the store: the request itself asks the store nothing.
        """
        del request
        processes, outage = self._processes(), self.recorder.outage
        reason = outage.reason if outage.is_on else self.feed.failure
        if not reason:
            return web.json_response({"status": "ok", **processes})
        status, code = ("spooling", 200) if self._takes_calls() else ("failing", 503)
        return web.json_response({"status": status, "store": reason, **processes}, status=code)

    def _processes(self) -> dict[str, str]:
        """Return how many of the gateway's processes serve, as ``N of M``; empty for a gateway with one process."""
        group = self.siblings.group
        if group is None:
            return {}
        serving = sum(not self.siblings.is_away(number) for number in range(group.count))
        return {"processes": f"{serving} of {group.count}"}

    def _takes_calls(self) -> bool:
        if self.recorder.spool is None:
            return False
        try:
            self.recorder.spool.check_room()
        except Problem:
            return False
        return True

    async def openapi(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the API's OpenAPI document."""
        self.access.check(request)
        return web.json_response(openapi_document(server=f"{request.scheme}://{request.host}"))


def _gauge(name: str, text: str, values: Mapping[str, float] | float) -> Family:
    return name, "gauge", text, values


def _counter(name: str, text: str, values: Mapping[str, float] | float) -> Family:
    return name, "counter", text, values


def _each(gates: Mapping[str, CallGate], name: str) -> dict[str, float]:
    """Return the attribute ``name`` of every policy's gate, by policy name."""
    return {policy: getattr(gate, name) for policy, gate in gates.items()}


def render(families: Iterable[Family], *, label: str = "policy") -> str:
    """Render metrics in Prometheus' text format.

    Args:
        families: The metrics.
        label: The label under which a metric with several numbers shows their keys.
    """
    out: list[str] = []
    for name, kind, text, values in families:
        out += [*_head(name, kind, text), *_lines(name, values, label=label)]
    return "\n".join(out) + "\n"


def labelled(processes: Mapping[int, Sequence[Family]]) -> str:
    """Render the metrics of several processes: each metric once, and each number with the label ``process``."""
    families: dict[str, list[str]] = {}
    for number, found in sorted(processes.items()):
        for name, kind, text, values in found:
            lines = families.setdefault(name, _head(name, kind, text))
            lines += _lines(name, values, label="policy", more=f'process="{number}"')
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _lines(name: str, values: Mapping[str, float] | float, *, label: str, more: str = "") -> list[str]:
    if not isinstance(values, Mapping):
        return [f"{name}{{{more}}} {values:.12g}" if more else f"{name} {values:.12g}"]
    rest = f",{more}" if more else ""
    return [f'{name}{{{label}="{_escaped(key)}"{rest}}} {value:.12g}' for key, value in values.items()]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
