"""Builds the parts of a worker from an experiment's plan: the attempts' context, the tracers and the runner."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agl.contracts import Runner, Tracer
from agl.errors import RunError
from agl.schemas import Claim, Outcome
from agl_run.parts.build import build_rewards
from agl_run.parts.rewards import named
from agl_run.plan import Plan
from agl_run.runners.setup import RunContext, environment

ALWAYS_ON = ("otel", "own-spans", "wire", "unrecorded")
"""Tracers that every experiment uses without listing them."""


class NoRunner:
    """The runner of an experiment that leaves all attempts to remote workers."""

    async def start(self) -> None:
        """Do nothing."""

    async def execute(self, claim: Claim) -> Outcome:
        """Raise :class:`RunError`: this process claims no attempts."""
        raise RunError(f"attempt {claim.attempt.attempt_id!r} was claimed where [runner] concurrency is 0")

    async def stop(self) -> None:
        """Do nothing, as no attempt runs."""


def run_context(
    plan: Plan, tracers: Sequence[tuple[str, Tracer]], *, unreachable: Mapping[str, str] | None = None, **parts: Any
) -> RunContext:
    """Make the context of a run, for the experiment's own process or for a remote worker.

    Args:
        plan: The experiment.
        tracers: The tracers by name.
        unreachable: For each policy that this machine cannot reach directly, the reason.
        parts: Further arguments of :class:`RunContext` that are not in the plan, such as ``store`` and ``gateway``.
    """
    rewards = build_rewards(plan, parts.get("upstreams", ()), unreachable=unreachable)
    return RunContext(
        agent=plan.agent,
        experiment=plan.name,
        # Errors name the reward and its line, since a worker's log may be all that a person sees.
        rewards=[(name, named(name, emitter, folder=plan.folder)) for name, emitter in rewards],
        tracers=tracers,
        plugins=plan.manager.worker_env(),
        workdir=plan.workdir,
        ca=ca_of(plan),
        **parts,
    )


def make_runner(plan: Plan, context: RunContext) -> Runner:
    """Build the experiment's runner; if the concurrency is 0, return a runner that runs no attempts."""
    config = plan.config.runner
    # Without slots nothing is claimed, and building the runner could fail for what only workers
    # have.
    if not context.concurrency:
        return NoRunner()
    return plan.manager.build(plan.manager.runner(config.use), setup=context, **config.params)


def ca_of(plan: Plan) -> Path | None:
    """Return the file of ``[gateway] ca``, joined to the experiment's folder; ``None`` if it is not set."""
    ca = plan.config.gateway.ca
    return plan.folder / ca if ca else None


def make_tracers(plan: Plan, stack: ExitStack) -> list[tuple[str, Tracer]]:
    """Build the experiment's tracers with their names; the variables that they need are set until ``stack`` closes."""
    manager = plan.manager
    # A tracer that is listed although it is always on is installed once.
    names = dict.fromkeys((*plan.config.tracers, *ALWAYS_ON))
    tracers: list[tuple[str, Tracer]] = [(name, manager.build(manager.tracer(name))) for name in names]
    for _, tracer in tracers:
        # Child processes inherit the settings of tracers by the environment.
        stack.enter_context(environment(tracer.worker_env()))
    return tracers
