"""Builds a worker's parts from an experiment's plan, for the experiment's own process and for a remote worker."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from agl.contracts import Runner, Store, Tracer, Upstream
from agl.errors import RunError
from agl.schemas import Claim, NamedResources, Outcome, Rollout
from agl_run.access.tokens import Secret
from agl_run.parts.build import build_rewards
from agl_run.parts.rewards import named
from agl_run.plan import Plan
from agl_run.runners.setup import RunSetup, SettlingGateway, environment
from agl_run.worker.worker import WorkerSetup

ALWAYS_ON = ("otel", "own-spans", "wire", "unrecorded")
"""Tracers that no experiment has to name."""


class NoRunner:
    """The runner of an experiment that leaves all attempts to remote workers."""

    async def start(self) -> None:
        """Do nothing."""

    async def execute(self, claim: Claim) -> Outcome:
        """Raise :class:`RunError`: this process claims no attempts."""
        raise RunError(f"attempt {claim.attempt.attempt_id!r} was claimed where [runner] concurrency is 0")

    async def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The parts of a worker that its plan does not give.

    Attributes:
        store: Where rollouts come from.
        secret: Signs the tokens of attempts; ``None`` where these come with the claims.
        resources: Returns the resources of a rollout.
        gateway_url: Base URL without ``/v1``; ``""`` where calls are recorded in the agent's process.
        gateway: Settles an attempt's calls before the attempt ends.
        upstreams: The running policies.
        unreachable: Policies that this machine cannot reach past the gateway, with the reason.
        requires_calls: Whether a successful attempt without any model call is a failure.
        concurrency: Attempts at once; 0 for none.
    """

    store: Store
    secret: Secret | None
    resources: Callable[[Rollout], Awaitable[NamedResources]]
    gateway_url: str
    gateway: SettlingGateway | None
    upstreams: Sequence[Upstream]
    requires_calls: bool
    concurrency: int
    unreachable: Mapping[str, str] = field(default_factory=dict[str, str])


def worker_setup(plan: Plan, context: WorkerContext, tracers: Sequence[tuple[str, Tracer]]) -> WorkerSetup:
    """Build the setup of a worker for this experiment."""
    manager, config = plan.manager, plan.config.runner
    setup = RunSetup(
        agent=plan.agent,
        store=context.store,
        secret=context.secret,
        resources=context.resources,
        gateway_url=context.gateway_url,
        gateway=context.gateway,
        upstreams=context.upstreams,
        tracers=tracers,
        plugins=manager.worker_env(),
        concurrency=context.concurrency,
        workdir=plan.workdir,
        ca=ca_of(plan),
    )
    runner: Runner = (
        manager.build(manager.runner(config.use), setup=setup, **config.params) if context.concurrency else NoRunner()
    )
    rewards = build_rewards(plan, context.upstreams, unreachable=context.unreachable)
    return WorkerSetup(
        store=context.store,
        runner=runner,
        experiment=plan.name,
        concurrency=context.concurrency,
        rewards=[(name, named(name, emitter, folder=plan.folder)) for name, emitter in rewards],
        gateway=context.gateway,
        requires_calls=context.requires_calls,
    )


def ca_of(plan: Plan) -> Path | None:
    """Return the file of ``[gateway] ca``, which is named from the experiment's folder."""
    ca = plan.config.gateway.ca
    return plan.folder / ca if ca else None


def make_tracers(plan: Plan, stack: ExitStack) -> list[tuple[str, Tracer]]:
    """Build the experiment's tracers by name; their environment is set until ``stack`` closes."""
    manager = plan.manager
    names = dict.fromkeys((*plan.config.tracers, *ALWAYS_ON))
    tracers: list[tuple[str, Tracer]] = [(name, manager.build(manager.tracer(name))) for name in names]
    for _, tracer in tracers:
        stack.enter_context(environment(tracer.worker_env()))
    return tracers
