"""Building every component of a plan once, so that wrong parameters and missing packages show before a run."""

from collections.abc import Iterable, Mapping
from typing import Any

from agl.contracts import RewardEmitter, RewardSetup, Upstream
from agl.errors import ConfigError
from agl.experiment.plan import Plan
from agl.experiment.replays import check_replays
from agl.schemas import LLM


async def check_components(plan: Plan) -> None:
    """Build and release everything that can be built without starting it; raises what is wrong."""
    config, manager = plan.config, plan.manager
    for credit in (config.credit, *(a.credit for a in config.algorithm if a.credit is not None)):
        check_replays(plan, manager.build(manager.credit(credit.use), **credit.params))
    build_rewards(plan)
    for name in config.tracers:
        manager.build(manager.tracer(name))
    trained = plan.trained_policies() if plan.needs_token_ids() else set[str]()
    for name, policy in config.policy.items():
        built = manager.build(manager.policy(policy.use), name=name, **policy.params)
        if name in trained and not built.has_token_ids:
            raise ConfigError(no_token_ids(name, policy.use))
    for algorithm in config.algorithm:
        await manager.build(plan.entry(algorithm), **algorithm.params).close()


def build_rewards(plan: Plan, upstreams: Iterable[Upstream] = ()) -> list[tuple[str, RewardEmitter]]:
    """The reward emitters by the names that they are used under; ``upstreams`` are the running policies."""
    manager = plan.manager
    policies = {name: LLM() for name in plan.config.policy}
    policies |= {up.name: LLM(endpoint=up.base_url, model=up.model, api_key_env=up.api_key_env) for up in upstreams}

    def build(use: str, params: Mapping[str, Any]) -> RewardEmitter:
        entry = manager.reward(use)
        return manager.build(entry, **({**params, "setup": setup} if entry.takes_setup else params))

    setup = RewardSetup(folder=plan.folder, policies=policies, build=build)
    return [(item.use, build(item.use, item.params)) for item in plan.config.reward]


def no_token_ids(name: str, use: str) -> str:
    """What is wrong with training on the tokens of a backend that gives none."""
    return (
        f"an algorithm trains on the tokens of {name!r}, and its backend (use = {use!r}) returns no token ids; "
        "serve it with torch, vLLM or SGLang, or set has_token_ids = true if it does return them"
    )
