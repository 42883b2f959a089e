"""Building every component of a plan once, so that wrong parameters and missing packages show before a run."""

from agl.errors import ConfigError
from agl.experiment.plan import Plan


async def check_components(plan: Plan) -> None:
    """Build and release everything that can be built without starting it; raises what is wrong."""
    config, manager = plan.config, plan.manager
    manager.build(manager.credit(config.credit.use), **config.credit.params)
    for item in config.reward:
        manager.build(manager.reward(item.use), **item.params)
    for name in config.tracers:
        manager.build(manager.tracer(name))
    trained = plan.trained_policies() if plan.needs_token_ids() else set[str]()
    for name, policy in config.policy.items():
        built = manager.build(manager.policy(policy.use), name=name, **policy.params)
        if name in trained and not built.has_token_ids:
            raise ConfigError(no_token_ids(name, policy.use))
    for algorithm in config.algorithm:
        await manager.build(plan.entry(algorithm), **algorithm.params).close()


def no_token_ids(name: str, use: str) -> str:
    """What is wrong with training on the tokens of a backend that gives none."""
    return (
        f"an algorithm trains on the tokens of {name!r}, and its backend (use = {use!r}) returns no token ids; "
        "serve it with torch, vLLM or SGLang, or set has_token_ids = true if it does return them"
    )
