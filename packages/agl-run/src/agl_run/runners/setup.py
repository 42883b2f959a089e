"""The context that all attempts of a run share: store, agent, gateway, rewards and tracers."""

import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from agl.contracts import POLICY_KEY_ENV, RewardEmitter, Store, Tracer, Upstream
from agl.errors import RunError, TokenError
from agl.schemas import Claim, NamedResources, Outcome, Rollout
from agl_run.access.secret import SECRET_ENV, SECRET_FILE_ENV
from agl_run.access.tokens import PLACEHOLDER_KEY, AttemptTokens, IssuedClaim, Secret, issue_token
from agl_run.access.trust import trust_variables
from agl_run.access.worker_token import WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV
from agl_run.agents.agent import AgentSpec

ADMIN_TOKEN_ENV = "AGL_TOKEN"
"""Environment variable with the admin token of a served store; in a command's process, with the attempt's token."""

TOKEN_FILE_ENV = "AGL_TOKEN_FILE"
"""Environment variable that names a file with the admin token of a served store."""


async def no_resources(_: Rollout) -> NamedResources:
    """Return an empty mapping, for runs without resources."""
    return {}


class SettlingGateway(Protocol):
    """A gateway, local or remote, that can wait until an attempt's calls are stored."""

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store.

        Raises:
            GatewayLostError: The gateway ended in the meantime; the worker gives the attempt back.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Everything that the attempts of a run share, in the experiment's own process or in a remote worker.

    Attributes:
        store: Source of rollouts, and destination of spans and outcomes.
        agent: The agent to run.
        experiment: The experiment whose rollouts are claimed; ``None`` for all.
        secret: Signs attempt tokens; never stored. ``None`` if the tokens come with the claims, as for a worker with a
            worker's token.
        resources: Returns the resources of a rollout, with pinned versions applied.
        gateway_url: The gateway's base URL without ``/v1``; ``""`` if model calls are recorded in the process.
        gateway: The gateway, which is asked to store an attempt's calls before the attempt ends.
        rewards: Reward emitters by name, run after the agent; they see the hidden keys of tasks.
        requires_calls: Whether an attempt that succeeds without any model call counts as failed.
        upstreams: The configured policies, from which the wire hook knows which calls to redirect.
        tracers: The tracers to install in the process that runs the agent, with their names.
        plugins: Environment variables that make child processes load the same plugins, such as
            ``AGL_DISABLED_PLUGINS``.
        concurrency: Attempts at once; 0 leaves all attempts to remote workers.
        workdir: Folder of the experiment's files; ``None`` if there is none.
        ca: File with the certificate authorities to trust for the gateway; ``None`` for the file in ``AGL_CA_FILE``,
            if it is set.
    """

    store: Store
    agent: AgentSpec = field(default_factory=AgentSpec)
    secret: Secret | None = None
    resources: Callable[[Rollout], Awaitable[NamedResources]] = no_resources
    experiment: str | None = None
    gateway_url: str = ""
    gateway: SettlingGateway | None = None
    rewards: Sequence[tuple[str, RewardEmitter]] = ()
    requires_calls: bool = False
    upstreams: Sequence[Upstream] = ()
    tracers: Sequence[tuple[str, Tracer]] = ()
    plugins: dict[str, str] = field(default_factory=dict[str, str])
    concurrency: int = 8
    workdir: Path | None = None
    ca: Path | None = None

    def token_of(self, claim: Claim) -> str:
        """Return the token of a claimed attempt: the token in the claim, or else a newly signed one.

        Raises:
            TokenError: The claim has no token, and this worker has no key to sign one.
        """
        # A worker with a token of its own gets the attempt's from the gateway; it could not sign
        # one.
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
        """The default base URL of an agent's client, with ``/v1``; ``""`` if there is neither gateway nor policy."""
        if self.gateway_url:
            return f"{self.gateway_url}/v1"
        return self.upstreams[0].base_url if self.upstreams else ""

    def environment(self, token: str = PLACEHOLDER_KEY) -> dict[str, str]:
        """Return the variables that point OpenAI's and Anthropic's clients at the model; empty without a model.

        If the gateway has a certificate, the variables also make clients trust its authority.
        """
        # Plain http needs no authority, and a variable that is set needlessly can break another
        # client.
        trust = trust_variables(self.ca) if self.gateway_url.startswith("https:") else {}
        direct = without_proxy(self.gateway_url) if self.gateway_url else {}
        return {**client_environment(self.base_url, token), **trust, **direct} if self.base_url else {}


def environment_for_agents(setup: RunContext) -> dict[str, str]:
    """Return this process's environment without keys that agents do not need.

    These are the keys of the store, and the policies' keys if a gateway adds them to calls.
    """
    # The agent does not need keys that the gateway adds, and cannot leak keys that it does not
    # have.
    held = {upstream.api_key_env for upstream in setup.upstreams} if setup.gateway_url else set[str]()
    # With one of these an agent could sign tokens for any attempt, or read the whole store.
    own = {SECRET_ENV, SECRET_FILE_ENV, ADMIN_TOKEN_ENV, TOKEN_FILE_ENV, WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV}
    return {name: value for name, value in os.environ.items() if name not in {*own, POLICY_KEY_ENV, *held}}


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables, and restore the previous ones at the end."""
    # ``None`` stands for a variable that was not set, and is removed again.
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
    """Return the environment variables that point OpenAI's and Anthropic's clients at ``base_url``."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": token,
        # Anthropic's client adds the version to its paths itself.
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": token,
    }


def without_proxy(url: str) -> dict[str, str]:
    """Return the environment variables that exempt the host of ``url`` from the proxy; empty without a proxy."""
    if not getproxies_environment():
        return {}
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if given.strip() == "*":  # no host at all uses the proxy, which holds only while the star stands alone
        return {}
    hosts = ",".join(filter(None, (given, urlsplit(url).hostname)))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


class LostError(RunError):
    """Something that an attempt needs, such as its sandbox, went away; the agent is not to blame.

    The worker gives the attempt back, and it is repeated; the runner's ``max_losses`` limits how often.
    """


@runtime_checkable
class LastingRunner(Protocol):
    """A runner that leaves something of an attempt, such as a workspace, for the rewards to examine."""

    async def release(self, claim: Claim, outcome: Outcome | None) -> None:
        """Remove what is left of an attempt, once it is judged and before its outcome is written.

        Args:
            claim: The attempt with which :meth:`execute` was called.
            outcome: The attempt's outcome; ``None`` if the attempt was given back and will be repeated.
        """
        ...
