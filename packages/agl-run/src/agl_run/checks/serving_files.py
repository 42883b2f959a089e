"""Finds the policies whose weights must be on disk in every step, whatever an algorithm's ``save_every`` says."""

import inspect

from agl.algorithms import AlgorithmConfig
from agl_run.plan import Plan


def served_from_disk(plan: Plan) -> list[str]:
    """Return a line for each algorithm that could let its steps wait, and tunes a policy that reads weights from disk.

    A policy in this process takes them from memory: it has the method ``offer_weights``. One of the algorithm's own
    name gets them from its trainer, and the algorithm says so where it does not.
    """
    return [
        f"{algorithm.name} writes the weights of {name} in every step, because {plan.config.policy[name].use} reads "
        "them from disk; save_every spaces the state of training alone"
        for algorithm in plan.config.algorithm
        if _can_wait(plan, algorithm)
        for name in algorithm.tunes
        if name in plan.config.policy and plan.config.policy[name].use != algorithm.use and _reads_files(plan, name)
    ]


def _can_wait(plan: Plan, algorithm: AlgorithmConfig) -> bool:
    """Return true if steps may wait: the algorithm has the setting ``saving.save_every``, and it is not 1."""
    known = inspect.signature(plan.manager.resolve(plan.entry(algorithm))).parameters
    default = getattr(known["saving"].default, "save_every", None) if "saving" in known else None
    return algorithm.params.get("saving", {}).get("save_every", default) not in (None, 1)


def _reads_files(plan: Plan, name: str) -> bool:
    entry = plan.manager.policy(plan.config.policy[name].use)
    return not hasattr(plan.manager.resolve(entry), "offer_weights")
