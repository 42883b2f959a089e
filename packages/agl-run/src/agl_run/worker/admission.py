"""Admits a worker on another machine: makes the worker's plan, and finds reasons why it cannot join."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import agl
from agl import PluginManager
from agl.errors import ConfigError, GatewayLostError
from agl.schemas import to_json
from agl_run.config.agent import agent_of, with_runner
from agl_run.config.sections import ExperimentConfig
from agl_run.parts.rewards import check_known
from agl_run.plan import Plan, load_agent
from agl_run.worker.address import is_loopback
from agl_run.worker.cluster_share import with_fleet
from agl_run.worker.invitation import Announcement, settings_of
from agl_run.worker.remote_gateway import RemoteGateway


@dataclass(frozen=True, kw_only=True)
class JoinProblem:
    """The reason why a worker cannot join an experiment.

    Attributes:
        kind: ``settings`` if the settings of worker and experiment differ, ``gateway`` if the worker cannot use the
            gateway.
        text: The problem and the next step.
    """

    kind: Literal["settings", "gateway"]
    text: str


def make_worker_plan(config: ExperimentConfig, *, folder: Path, manager: PluginManager) -> Plan:
    """Make a plan that suffices to run attempts; it has no tasks, algorithms or policies.

    Raises:
        ConfigError: The agent cannot be loaded.
        PluginError: The runner, a tracer or a reward is not installed.
    """
    section = config.experiment
    agent = agent_of(section, folder, manager)
    config = with_runner(with_fleet(config, manager)[0], agent)
    plan = Plan(
        config=config,
        folder=folder,
        manager=manager,
        agent=agent,
        train=(),
        val=(),
        resources={},
        store=None,
        workdir=folder / section.workdir / section.name,
    )
    # Looked up without being built: a missing package is named now, and not at the first attempt.
    manager.runner(config.runner.use)
    for name in config.tracers:
        manager.tracer(name)
    if plan.agent.command and config.runner.use == "async":
        raise ConfigError('the agent is a command; set [runner] use = "command"')
    if plan.agent.is_imported:
        load_agent(plan.agent)
    check_known(plan)
    return plan


def differences(serving: Announcement, plan: Plan) -> JoinProblem | None:
    """Return the first difference between the experiment's settings and release and this machine's, or ``None``."""
    # Records and tokens are not promised to be equal between releases, so the releases must be.
    if serving.release != agl.__version__:
        return _differs(serving, f"runs with agl-core {serving.release} and this is {agl.__version__}: install that")
    mine = settings_of(plan)
    for key, theirs in serving.settings.items():
        # Compared as JSON: the other side's values went through the store, which has lists where
        # records have tuples.
        if key in mine and to_json(mine[key]) != to_json(theirs):
            what = f"{key} is {_shown(theirs)} there and {_shown(mine[key])} here"
            return _differs(serving, f"has other settings: {what}; use the same experiment file")
    return None


async def try_gateway(serving: Announcement, gateway: RemoteGateway, *, is_given: bool) -> JoinProblem | None:
    """Check that this machine reaches the experiment's gateway; return the problem, or ``None``.

    ``is_given`` says that an option gave the gateway's URL.
    """
    where = f"the gateway {gateway.url} of the experiment on {serving.host!r}"
    # An address that was given may be the end of a tunnel, so only the advertised one is judged by
    # its form.
    if is_loopback(gateway.url) and not serving.is_of_this_machine and not is_given:
        return JoinProblem(
            kind="gateway",
            text=f"{where} listens on its own machine only, and this is another one. There, set [gateway] params = "
            '{ host = "0.0.0.0", port = 4748 }, and advertise = "HOST" if HOST is not the address that its network '
            "interface has; or give the address at which this machine reaches it with --gateway",
        )
    try:
        problem = await gateway.look()
    except GatewayLostError as error:
        return JoinProblem(kind="gateway", text=str(error))
    if not problem:
        return None
    if gateway.is_refused:
        return JoinProblem(kind="gateway", text=f"{where} {problem}")
    return JoinProblem(
        kind="gateway",
        text=f"{where} {problem}. Check that the port is open from here, and [gateway] advertise there, which says "
        "what other machines call it; or give its address with --gateway",
    )


def unreachable_policies(serving: Announcement) -> dict[str, str]:
    """Map each policy that only the experiment's machine can call directly to an error text with the remedy."""
    # On the experiment's own machine everything that listens on loopback is reachable.
    if serving.is_of_this_machine:
        return {}
    return {
        upstream.name: f"a reward calls the policy {upstream.name!r} directly, which serves at {upstream.base_url} on "
        f"{serving.host!r}, where only that machine reaches it; let it listen on an address of the network, or give "
        "the reward a model of its own"
        for upstream in serving.upstreams
        if is_loopback(upstream.base_url)
    }


def check_direct_calls(serving: Announcement) -> JoinProblem | None:
    """Return a problem if there is no gateway and this machine cannot reach a policy's server; else ``None``."""
    lost = unreachable_policies(serving)
    if serving.gateway_url or not lost:
        return None
    first = next(upstream for upstream in serving.upstreams if upstream.name in lost)
    return JoinProblem(
        kind="settings",
        text=f"the experiment on {serving.host!r} has no gateway, and its policy {first.name!r} serves at "
        f'{first.base_url}, where only that machine reaches it; remove [gateway] use = "none" there, or let the policy '
        "listen on an address of the network",
    )


def _differs(serving: Announcement, what: str) -> JoinProblem:
    return JoinProblem(kind="settings", text=f"the experiment on {serving.host!r} {what}")


def _shown(value: Any) -> str:
    text = to_json(value).decode()
    return text if len(text) <= 100 else f"{text[:100]}..."
