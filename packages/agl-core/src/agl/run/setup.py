"""What a runner needs to know, apart from the attempt that it runs."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agl.contracts import Gateway, Store, Tracer, Upstream
from agl.run.agent import AgentSpec
from agl.schemas import NamedResources, Rollout


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """One experiment's settings for running attempts.

    Attributes:
        agent: The agent to run.
        store: Where spans go while an attempt runs.
        secret: Key that signs attempt tokens; never stored.
        gateway_url: The gateway's base URL without ``/v1``; ``""`` when model calls are recorded in the process.
        gateway: The gateway when it runs here, so that an attempt ends only after its calls are in the store.
        upstreams: The configured policies, so that the wire hook knows which calls to redirect.
        resources: Gives the resources of a rollout, pinned versions applied.
        tracers: Names of the tracers to install in the process that runs the agent, with the objects made.
        plugins: ``AGL_DISABLED_PLUGINS`` and the like for child processes.
        concurrency: Attempts at once.
        requires_calls: Whether an attempt without a model call is a failure.
    """

    agent: AgentSpec
    store: Store
    secret: bytes
    resources: Callable[[Rollout], Awaitable[NamedResources]]
    gateway_url: str = ""
    gateway: Gateway | None = None
    upstreams: Sequence[Upstream] = ()
    tracers: Sequence[tuple[str, Tracer]] = ()
    plugins: dict[str, str] = field(default_factory=dict[str, str])
    concurrency: int = 8
    requires_calls: bool = False
