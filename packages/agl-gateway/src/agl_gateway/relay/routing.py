"""The backends of a gateway with their keys, and the choice of one for each request."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agl.contracts import Upstream
from agl.errors import ConfigError
from agl.schemas import Dialect
from agl.tracing import upstreams_for
from agl_gateway.relay.replicas import Replicas
from agl_gateway.wire.problems import Problem


@dataclass(frozen=True)
class UpstreamTarget:
    """An upstream with its servers and its key, which is sent to the backend only."""

    upstream: Upstream
    replicas: Replicas
    key: str = field(default="", repr=False)

    def urls(self, rollout_id: str, endpoint: str, query: str) -> list[str]:
        """Return the URLs of ``endpoint``, such as ``/chat/completions``: the rollout's own server first."""
        tail = f"{endpoint}{'?' + query if query else ''}"
        return [base_url + tail for base_url in self.replicas.ranked(rollout_id)]


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
                raise ConfigError(f"two upstreams are named {upstream.name!r}; give each policy a name of its own")
            self.targets[upstream.name] = _target(upstream, known)

    def choose(self, model: str, *, dialect: Dialect = "chat", names: Sequence[str] = ()) -> UpstreamTarget:
        """Return the target of a call, by :func:`agl.tracing.upstreams_for`.

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
        raise Problem(404, self._unknown(model), code="model_not_found")

    def _unknown(self, model: str) -> str:
        if not self.targets:
            return (
                f"the request names model {model!r}, and this gateway has no upstream; "
                "start it with --upstream NAME=URL, or configure a [policy.NAME]"
            )
        return f"unknown model {model!r}; this gateway serves {self.models()}: use one of these names"

    def models(self) -> list[str]:
        """Return the model names that a request may use, aliases included, in order."""
        names: list[str] = []
        for target in self.targets.values():
            upstream = target.upstream
            names += [upstream.name, *([upstream.model] if upstream.model else []), *upstream.aliases]
        return list(dict.fromkeys(names))


def _ambiguous(found: Sequence[Upstream], model: str, names: Sequence[str]) -> Problem:
    """Return the problem that names the policies a call may be for, and how to tell them apart."""
    if upstreams_for(found, names=names):
        patterns = " and ".join(f"{upstream.name!r} (agents = {upstream.agents!r})" for upstream in found)
        text = f"the policies {patterns} both take calls made by {list(names)}; let one pattern match each agent"
        return Problem(409, text, code="ambiguous_agent")
    policies = " and ".join(repr(upstream.name) for upstream in found)
    text = f"the policies {policies} both serve the model {model!r}; ask for one of them by its name"
    return Problem(409, text, code="ambiguous_model")


def _target(upstream: Upstream, environ: Mapping[str, str]) -> UpstreamTarget:
    servers = (upstream.base_url, *upstream.replicas)
    for base_url in servers:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"upstream {upstream.name!r} has base_url {base_url!r}, which is not an http(s) URL; "
                "write it with its /v1, such as http://127.0.0.1:8000/v1"
            )
    key = environ.get(upstream.api_key_env, "") if upstream.api_key_env else ""
    if upstream.api_key_env and not key:
        raise ConfigError(
            f"upstream {upstream.name!r} takes its key from {upstream.api_key_env}, which is not set; export it "
            "where the gateway runs, or remove api_key_env"
        )
    return UpstreamTarget(upstream=upstream, replicas=Replicas([url.rstrip("/") for url in servers]), key=key)
