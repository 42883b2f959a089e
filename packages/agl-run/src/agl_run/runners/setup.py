"""The settings of a runner that all its attempts share."""

import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from agl.contracts import POLICY_KEY_ENV, Store, Tracer, Upstream
from agl.errors import TokenError
from agl.schemas import Claim, NamedResources, Rollout
from agl_run.access.placeholder_key import PLACEHOLDER_KEY
from agl_run.access.secret import SECRET_ENV, SECRET_FILE_ENV
from agl_run.access.tokens import AttemptTokens, IssuedClaim, Secret, issue_token
from agl_run.access.trust import trust_variables
from agl_run.access.worker_token import WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV
from agl_run.agents.agent import AgentSpec

ADMIN_TOKEN_ENV = "AGL_TOKEN"
"""Variable with the admin token of a served store; in a command's process, with the attempt's token."""

TOKEN_FILE_ENV = "AGL_TOKEN_FILE"
"""Variable with the name of a file that holds the admin token of a served store."""


class SettlingGateway(Protocol):
    """A gateway that can wait for an attempt's calls, local or remote."""

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store.

        Raises:
            GatewayLostError: The gateway went away meanwhile; the worker gives the attempt back.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """One experiment's settings for running attempts.

    Attributes:
        agent: The agent to run.
        store: Where spans go while an attempt runs.
        secret: Signs attempt tokens; never stored. ``None`` where they come with the claims, for a worker's token.
        resources: Returns the resources of a rollout, with pinned versions applied.
        gateway_url: The gateway's base URL without ``/v1``; ``""`` when model calls are recorded in the process.
        gateway: The gateway, local or remote, so that an attempt ends only after its calls are in the store.
        upstreams: The configured policies, so that the wire hook knows which calls to redirect.
        tracers: Names of the tracers to install in the process that runs the agent, with the objects made.
        plugins: Environment that makes child processes load the same plugins, such as ``AGL_DISABLED_PLUGINS``.
        concurrency: Attempts at once.
        workdir: Where the experiment keeps its files; ``None`` for none.
        ca: File with the authorities of the gateway's certificate; ``None`` for that of ``AGL_CA_FILE``, if it is set.
    """

    agent: AgentSpec
    store: Store
    secret: Secret | None
    resources: Callable[[Rollout], Awaitable[NamedResources]]
    gateway_url: str = ""
    gateway: SettlingGateway | None = None
    upstreams: Sequence[Upstream] = ()
    tracers: Sequence[tuple[str, Tracer]] = ()
    plugins: dict[str, str] = field(default_factory=dict[str, str])
    concurrency: int = 8
    workdir: Path | None = None
    ca: Path | None = None

    def token_of(self, claim: Claim) -> str:
        """Return the token of a claimed attempt: that which came with the claim, else one that is signed here.

        Raises:
            TokenError: There is neither a token nor a key.
        """
        if isinstance(claim, IssuedClaim):
            return claim.token
        if self._tokens is None:
            raise TokenError(
                f"attempt {claim.attempt.attempt_id!r} was claimed without its token, and this worker has no key to "
                "sign one; claim with a worker's token from a gateway of this release, or set AGL_SECRET"
            )
        return issue_token(self._tokens, claim.rollout, claim.attempt)

    @cached_property
    def _tokens(self) -> AttemptTokens | None:
        return None if self.secret is None else AttemptTokens(self.secret)

    @property
    def base_url(self) -> str:
        """The default base URL of an agent's client, with ``/v1``; ``""`` if nothing is configured."""
        if self.gateway_url:
            return f"{self.gateway_url}/v1"
        return self.upstreams[0].base_url if self.upstreams else ""

    def environment(self, token: str = PLACEHOLDER_KEY) -> dict[str, str]:
        """Return the variables that point OpenAI's and Anthropic's clients at the model; empty without one.

        With a gateway that has a certificate they also make clients trust its authority.
        """
        trust = trust_variables(self.ca) if self.gateway_url.startswith("https:") else {}
        return {**client_environment(self.base_url, token), **trust} if self.base_url else {}


def environment_for_agents(setup: RunSetup) -> dict[str, str]:
    """Return this process's environment without the keys of the store, and without those that a gateway holds."""
    held = {upstream.api_key_env for upstream in setup.upstreams} if setup.gateway_url else set[str]()
    own = {SECRET_ENV, SECRET_FILE_ENV, ADMIN_TOKEN_ENV, TOKEN_FILE_ENV, WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV}
    return {name: value for name, value in os.environ.items() if name not in {*own, POLICY_KEY_ENV, *held}}


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables, and restore the previous ones at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def client_environment(base_url: str, token: str) -> dict[str, str]:
    """Return the variables that point OpenAI's and Anthropic's clients at ``base_url``."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": token,
    }
