"""Compares two versions by the tasks on which both were validated, or by all of their rollouts."""

from agl_inspect.statistics.comparison import Comparison, compare, compare_tasks
from agl_inspect.versions.lineage import Arm


def compare_arms(old: Arm, new: Arm, *, confidence: float) -> tuple[Comparison, tuple[Arm, Arm], str]:
    """Return the comparison, the arms with the rewards that it counts, and a note on the pairing.

    Rewards are paired by task if both versions were validated on at least two tasks of the same content, and on at
    least half of the tasks of either; otherwise all rollouts count.

    Raises:
        ConfigError: There are too few rewards.
    """
    common = [task for task in old.validated if task in new.validated]
    counts = len(old.validated), len(new.validated)
    if len(common) < 2 or 2 * len(common) < max(counts):
        return compare(old.rewards, new.rewards, confidence=confidence), (old, new), _why_not(old, new, len(common))
    arms = _on(old, common), _on(new, common)
    left_out = sum(counts) - 2 * len(common)
    note = f"tasks that only one of them was validated on are left out: {left_out}" if left_out else ""
    return compare_tasks(arms[0].validated, arms[1].validated, confidence=confidence), arms, note


def _on(arm: Arm, tasks: list[str]) -> Arm:
    """Return an arm with the validations on some tasks only."""
    validated = {task: arm.validated[task] for task in tasks}
    rewards = [reward for found in validated.values() for reward in found]
    return Arm(version=arm.version, rewards=rewards, validated=validated)


def _why_not(old: Arm, new: Arm, common: int) -> str:
    for arm in (old, new):
        if not arm.validated:
            return f"not paired by task: {arm.version} has no validation with a reward"
    counts = f"{len(old.validated)} and {len(new.validated)} validation tasks"
    return f"not paired by task: of {counts} only {common} are in both"
