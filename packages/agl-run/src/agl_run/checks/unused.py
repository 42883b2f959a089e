"""Notices settings that no part of an experiment uses, although nothing is wrong with them."""

from agl_run.config.records import EPISODE
from agl_run.plan import Plan

_WHY = "a credit spreads rewards over the calls that train weights"


def unused_credits(plan: Plan) -> list[str]:
    """Return a notice for each credit that is set where no algorithm trains weights."""
    config, trained = plan.config, plan.trained_policies()
    said: list[str] = []
    if config.credit != EPISODE and not trained:
        said.append(
            f"[credit] use = {config.credit.use!r} has no effect: {_WHY}, and no algorithm here does that; remove it, "
            "or add an algorithm that tunes a policy, such as grpo"
        )
    for algorithm in config.algorithm:
        if algorithm.credit is not None and trained.isdisjoint(algorithm.tunes):
            tunes = ", ".join(algorithm.tunes)
            said.append(
                f"credit of the algorithm {algorithm.name!r} has no effect: {_WHY}, and this one tunes {tunes}; "
                "remove it"
            )
    return said
