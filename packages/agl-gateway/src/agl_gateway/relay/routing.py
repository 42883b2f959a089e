"""Chooses the backend of each request: the policy by the model's name, then one of the policy's servers.

All calls of a rollout go to one server, which then has the rollout's prompt prefixes cached. The choice is rendezvous
hashing (Thaler and Ravishankar 1998): servers rank by a hash of rollout and address. So a server that leaves or returns
moves only its own rollouts, and all gateways choose alike without communication. A server with far more calls in flight
than the others passes calls on to the rollout's next server.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from agl.contracts import Upstream
from agl.errors import ConfigError
from agl.schemas import Dialect
from agl.served_calls import CallGate, ServerLoad
from agl.tracing import upstreams_for
from agl.urls import base_url_of
from agl_gateway.wire.problems import Problem
from agl_run import is_loopback


class Replicas:
    """The servers of one policy, at least one. Used in one event loop only."""

    def __init__(self, base_urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._base_urls = tuple(base_urls)
        self.load = ServerLoad(clock=clock)

    def ranked(self, rollout_id: str) -> list[str]:
        """Return the base URLs in the order to try: the rollout's own first, recently failed servers last.

        Busy servers come before the failed ones.
        """
        if len(self._base_urls) == 1:
            return [*self._base_urls]
        busy = self.load.busy(self._base_urls)
        keys = {url: blake2b(f"{rollout_id}\n{url}".encode(), digest_size=8).digest() for url in self._base_urls}
        return sorted(self._base_urls, key=lambda url: (self.load.is_resting(url), url in busy, keys[url]))


@dataclass(frozen=True)
class UpstreamTarget:
    """An upstream with its servers, the gate for its calls, and its API key, which is sent to the backend only."""

    upstream: Upstream
    replicas: Replicas
    gate: CallGate
    key: str = field(default="", repr=False)


class Router:
    """The configured upstreams; immutable.

    Args:
        upstreams: Upstreams with distinct names.
        environ: Environment to look up ``api_key_env`` in.

    Raises:
        ConfigError: Two upstreams share a name, a URL is not an http URL, or a key's variable is not set.
    """

    def __init__(self, upstreams: Sequence[Upstream], *, environ: Mapping[str, str] | None = None) -> None:
        known = os.environ if environ is None else environ
        self.targets: dict[str, UpstreamTarget] = {}
        self._upstreams = tuple(upstreams)
        for upstream in upstreams:
            if upstream.name in self.targets:
                raise ConfigError(f"two upstreams are named {upstream.name!r}; give each policy its own name")
            self.targets[upstream.name] = _target(upstream, known)

    def choose(self, model: str, *, dialect: Dialect = "chat", names: Sequence[str] = ()) -> UpstreamTarget:
        """Return the target of a call, chosen by :func:`agl.tracing.upstreams_for`.

        Args:
            model: The model that the request names.
            dialect: The API that is called.
            names: Names of the callers, innermost first.

        Raises:
            Problem: 404 for an unknown model, with the known names; 409 if several policies match.
        """
        found = upstreams_for(self._upstreams, dialect=dialect, model=model, names=names)
        if len(found) == 1:
            return self.targets[found[0].name]
        if found:
            raise _ambiguous(found, model, names)
        text = f"unknown model {model!r}; this gateway serves {self.models()}: use one of these names"
        if not self.targets:
            text = (
                f"the request names model {model!r}, and this gateway has no upstream; "
                "start it with --upstream NAME=URL, or configure a [policy.NAME]"
            )
        raise Problem(404, text, code="model_not_found")

    @property
    def gates(self) -> dict[str, CallGate]:
        """The call gate of each policy, by policy name."""
        return {name: target.gate for name, target in self.targets.items()}

    def models(self) -> list[str]:
        """Return the model names that a request may use, aliases included, in the order of the upstreams."""
        names: list[str] = []
        for target in self.targets.values():
            upstream = target.upstream
            names += [upstream.name, *([upstream.model] if upstream.model else []), *upstream.aliases]
        return list(dict.fromkeys(names))


def _ambiguous(found: Sequence[Upstream], model: str, names: Sequence[str]) -> Problem:
    """Return the problem for a call that several policies match; the message names them, and says how to select one."""
    if upstreams_for(found, names=names):
        patterns = " and ".join(f"{upstream.name!r} (agents = {upstream.agents!r})" for upstream in found)
        text = f"the policies {patterns} both take calls made by {list(names)}; let one pattern match each agent"
        return Problem(409, text, code="ambiguous_agent")
    policies = " and ".join(repr(upstream.name) for upstream in found)
    text = f"the policies {policies} both serve the model {model!r}; ask for one of them by its name"
    return Problem(409, text, code="ambiguous_model")


def proxy_for(url: str, proxies: Mapping[str, str]) -> str:
    """Return the URL of the proxy through which ``url`` is asked; ``""`` for none.

    Servers of this machine are asked directly, and those that ``NO_PROXY`` names.

    Args:
        proxies: The proxies of the environment by scheme, from :func:`urllib.request.getproxies_environment`.
    """
    proxy = proxies.get(urlsplit(url).scheme, "")
    if not proxy or is_loopback(url) or exemption(url, proxies):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def exemption(url: str, proxies: Mapping[str, str]) -> str:
    """Return the first entry of ``NO_PROXY`` that names the server of ``url``; ``""`` for none.

    An entry is a host, which includes the hosts below it, an address or a network such as ``10.0.0.0/8``; a host or an
    address may have a port. ``*`` names every server.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    entries = re.split(r"[,\s]+", proxies.get("no", ""))
    return next((entry for entry in entries if entry and _names(entry.lower(), host, port)), "")


def _names(entry: str, host: str, port: int) -> bool:
    with suppress(ValueError):  # of a host or an entry that is not an address
        return ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    name, _, only = entry.rpartition(":") if re.search(r":\d+$", entry) else (entry, "", "")
    name = name.strip("[]").removeprefix("*").lstrip(".")
    return entry == "*" or (name != "" and only in ("", str(port)) and f".{host}".endswith(f".{name}"))


def _target(upstream: Upstream, environ: Mapping[str, str]) -> UpstreamTarget:
    who = f"upstream {upstream.name!r}: base_url"
    servers = [base_url_of(url, who=who) for url in (upstream.base_url, *upstream.replicas)]
    key = environ.get(upstream.api_key_env, "") if upstream.api_key_env else ""
    if upstream.api_key_env and not key:
        raise ConfigError(
            f"upstream {upstream.name!r} takes its key from {upstream.api_key_env}, which is not set; export it "
            "where the gateway runs, or remove api_key_env"
        )
    gate = CallGate(model=upstream.model, model_version=upstream.model_version)
    return UpstreamTarget(upstream=upstream, replicas=Replicas(servers), gate=gate, key=key)
