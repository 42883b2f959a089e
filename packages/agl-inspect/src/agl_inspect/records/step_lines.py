"""Writes a step of an algorithm as one line: how good it was, and what tells why it learned or did not.

`agl run` prints the line when the step ends, and `agl show --steps` writes it again from the recorded metrics.
"""

import re
from collections.abc import Mapping

_SHOWN = re.compile(r"reward|loss|score")
_FIRST = ("reward", "reward_std", "loss", "score", "best_val_score")
"""Metrics that are shown before others of these words."""
_SHARES = ("truncated", "dropped", "silent", "effective")
"""Shares that an algorithm may report of a step's rollouts or tokens, as metrics such as `silent_share`."""
_COUNTS = {
    "groups_dropped": "silent groups dropped",
    "rollouts_extra": "extra rollouts",
    "rollouts_replayed": "rollouts replayed",
}
"""Counts that an algorithm may report of a step; those of 0 are left out."""
_HEALTH = ("kl", "anchor_kl", "entropy", "logprob_gap", "staleness")
"""Metrics that tell why a policy learns or does not."""
_SKIPPED = ("updates_skipped", "updates_nonfinite")
"""Counts of updates that were not made, for want of a gradient or of a finite one."""
_CLIPPED = ("clipped", "clipped_low", "clipped_high")
"""Shares of tokens whose gradient a bound has removed or bounded; a loss reports the first, or the others."""


def step_line(
    name: str,
    step: int,
    *,
    metrics: Mapping[str, float],
    has_published: bool,
    total: int = 0,
    ending: tuple[str, ...] = (),
) -> str:
    """Return the line.

    Args:
        name: The algorithm.
        step: The algorithm's own step, from 1.
        metrics: Its metrics by name, in any order; of those about rewards, losses and scores four are shown.
        has_published: True if the step published a version; one that did not, and skipped updates, trained nothing.
        total: Number of steps in all; smaller than `step` where it is not known.
        ending: What else to say of the step, such as the time left; empty parts are left out.
    """
    named = sorted(key for key in metrics if _SHOWN.search(key) and key not in _FIRST)
    shown = [f"{key} {metrics[key]:.3f}" for key in [*filter(metrics.__contains__, _FIRST), *named][:4]]
    shown += [f"{metrics[f'{key}_share']:.0%} {key}" for key in _SHARES if f"{key}_share" in metrics]
    shown += [f"{key} {metrics[key]:.3g}" for key in _HEALTH if key in metrics]
    shown += [f"{metrics[key]:.0f} {text}" for key, text in _COUNTS.items() if metrics.get(key)]
    clipped = sum(metrics.get(key, 0.0) for key in _CLIPPED)
    shown += [f"{clipped:.0%} clipped"] if clipped else []
    if any(metrics.get(key) for key in _SKIPPED) and not has_published:
        shown.append("trained nothing")
    place = f"step {step} of {total}" if total >= max(step, 1) else f"step {step}"
    return "; ".join((f"{name} {place}: {', '.join(shown) or 'done'}", *filter(None, ending)))


def version_of_step(experiment: str, run: int, algorithm: str, step: int) -> str:
    """Return the name of the versions that a step of an algorithm publishes in a run of an experiment."""
    return f"{experiment}-{run}-{algorithm}-{step}"
