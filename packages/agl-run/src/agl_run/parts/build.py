"""Builds every component of a plan once, so that wrong parameters and missing packages show before a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from agl.contracts import Exporter, RewardEmitter, RewardSetup, Sink, Upstream
from agl.errors import ConfigError
from agl.schemas import LLM, PromptTemplate
from agl_inspect.stores import located
from agl_run.parts.counterfactual import check_replays
from agl_run.parts.declared import check_keys, check_policy_key, check_template
from agl_run.parts.dry_check import check_without_starting
from agl_run.parts.gateway import check_place
from agl_run.parts.models import policy_params
from agl_run.parts.rewards import build_own, is_own
from agl_run.parts.waiting import loading, told
from agl_run.plan import Plan


async def check_components(plan: Plan, *, say: Callable[[str], None] | None = None) -> None:
    """Build and release every component that can be built without being started; raises the first error.

    Algorithms also check what they need of the plan, such as a budget for its tasks, and call the functions that they
    are given. ``say`` is called with a line for what takes longer than a second.
    """
    config, manager = plan.config, plan.manager
    for credit in (config.credit, *(a.credit for a in config.algorithm if a.credit is not None)):
        check_replays(plan, manager.build(manager.credit(credit.use), **credit.params))
    for name, resource in plan.resources.items():
        if isinstance(resource, PromptTemplate):
            check_template(name, resource)
    check_keys(plan)
    check_place(plan, store_url="" if plan.store else located(config.experiment.store, plan.folder))
    with told("importing the rewards, tracers and exporters", say=say):
        build_rewards(plan)
        for name in config.tracers:
            manager.build(manager.tracer(name))
        for _, exporter in build_exporters(plan):
            await exporter.close()
        build_sinks(plan)
    trained = plan.trained_policies() if plan.needs_token_ids() else set[str]()
    for name, policy in config.policy.items():
        with told(loading(name, policy.use, policy.params, folder=plan.folder), say=say):
            built = manager.build(manager.policy(policy.use), name=name, **policy_params(plan, name))
        if name in trained and not built.has_token_ids:
            raise ConfigError(no_token_ids(name, policy.use))
        check_policy_key(plan, name, built.resource())
    for algorithm in config.algorithm:
        with told(f"algorithm {algorithm.name!r}: checking {algorithm.use}", say=say):
            await check_without_starting(plan, algorithm)


async def check_algorithms(plan: Plan) -> None:
    """Build and release the algorithms, which check their parameters."""
    for algorithm in plan.config.algorithm:
        await plan.manager.build(plan.entry(algorithm), **algorithm.params).close()


class _Policies(dict[str, LLM]):
    """Policies by name; raises when one is asked for that this machine cannot reach."""

    def __init__(self, policies: Mapping[str, LLM], unreachable: Mapping[str, str]) -> None:
        super().__init__(policies)
        self._unreachable = unreachable

    def __getitem__(self, name: str) -> LLM:
        if name in self._unreachable:
            raise ConfigError(self._unreachable[name])
        return super().__getitem__(name)


def build_rewards(
    plan: Plan, upstreams: Iterable[Upstream] = (), *, unreachable: Mapping[str, str] | None = None
) -> list[tuple[str, RewardEmitter]]:
    """Build the reward emitters, with their names.

    Args:
        plan: The experiment.
        upstreams: The running policies.
        unreachable: Policies that this machine cannot reach, with the reason; a reward that asks for one is refused.
    """
    manager = plan.manager
    running = {up.name: LLM(endpoint=up.base_url, model=up.model, api_key_env=up.api_key_env) for up in upstreams}
    policies = _Policies({name: LLM() for name in plan.config.policy} | running, unreachable or {})

    def build(use: str, params: Mapping[str, Any]) -> RewardEmitter:
        if is_own(plan, use):
            return build_own(plan, use, params)
        entry = manager.reward(use)
        return manager.build(entry, **({**params, "setup": setup} if entry.takes_setup else params))

    setup = RewardSetup(folder=plan.folder, policies=policies, build=build)
    return [(item.use, build(item.use, item.params)) for item in plan.config.reward]


def build_exporters(plan: Plan) -> list[tuple[str, Exporter]]:
    """Build the destinations of finished rollouts, with their names."""
    return [(name, built) for name, built in _destinations(plan) if not isinstance(built, Sink)]


def build_sinks(plan: Plan) -> list[tuple[str, Sink]]:
    """Build the destinations of the run's numbers, with their names."""
    return [(name, built) for name, built in _destinations(plan) if isinstance(built, Sink)]


def _destinations(plan: Plan) -> Iterator[tuple[str, Exporter | Sink]]:
    manager = plan.manager
    for item in plan.config.exporter:
        yield item.use, manager.build(manager.exporter(item.use), **item.params)


def no_token_ids(name: str, use: str) -> str:
    """Return the error text for training on the tokens of a backend that returns no token ids."""
    return (
        f"an algorithm trains on the tokens of {name!r}, and its backend (use = {use!r}) returns no token ids; "
        "serve it with torch, vLLM or SGLang, or set has_token_ids = true if it does return them"
    )
