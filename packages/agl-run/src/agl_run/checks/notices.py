"""Notices about valid experiments: settings without effect, and too many rollouts on one event loop."""

from agl_run.config.sections import ASYNC, EPISODE
from agl_run.fleet import LOOP_ROLLOUTS
from agl_run.plan import Plan

_WHY = "a credit spreads rewards over the calls that train weights"


def unused_credits(plan: Plan) -> list[str]:
    """Return a notice for each credit setting that has no effect because no algorithm trains weights."""
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


def crowded_loop(use: str, concurrency: int, *, key: str) -> list[str]:
    """Return a notice if the runner would run too many rollouts on one event loop, else an empty list.

    Args:
        use: The name of the runner. Only ``async`` runs agents on the process's event loop.
        concurrency: The number of rollouts at once.
        key: The name of the setting that holds ``concurrency``, for the notice.
    """
    if use != ASYNC or concurrency <= LOOP_ROLLOUTS:
        return []
    more = -(-concurrency // LOOP_ROLLOUTS)
    return [
        f"{key} is {concurrency}, and beyond {LOOP_ROLLOUTS} rollouts on one event loop their calls wait for each "
        f"other; set it to {LOOP_ROLLOUTS} and run them in {more} processes: start agl worker FILE as often as that "
        "takes, here or on other machines, or agl run FILE --ray auto"
    ]
